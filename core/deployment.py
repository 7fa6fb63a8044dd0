"""`deployment.toml`: what a composition is made of. Strict: unknown keys are errors with path and hint."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from bien.core.errors import DeploymentError, nearest
from bien.core.sizes import parse_size
from bien.core.speculation.options import SpeculationSpec
from bien.core.strict import decode, join

MAX_WORKERS = 1024  # of all pools: each is a process, or an engine of the simulation
DTYPES = ("float64", "float32", "bfloat16", "float16")
MOST_TOKENS = 1 << 40  # of a worker's KV, or of a context: no machine has so much
# Claude Code begins its system prompt with a line whose hash changes with each request.
VOLATILE_LINES = ("x-anthropic-billing-header:.*",)
KV_TOKENS = 32768  # of a pool that says nothing about its KV


class Selection(msgspec.Struct, frozen=True):
    """One plugin of a kind: `use = "name"`, every other key is one of its parameters.

    In a file, a bare string is a selection without parameters: `scheduler = "fcfs"`.
    """

    use: str
    parameters: dict[str, Any] = {}


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`name` is a built-in name ("smollm2-135m"), a folder with config.json and safetensors, or a GGUF."""

    name: str = "smollm2-135m"
    dtype: str = "float32"
    block_tokens: int = 16
    max_context: int | None = None  # None: the model's own


class PoolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers of one kind. The KV of each is given as `kv_tokens`, what every paged group holds, or as
    `kv_memory`, bytes of all groups together (in a file also "2GiB"). Neither: `kv_tokens` = 32768, or
    what fits where the executor has a `machine`."""

    name: str = "main"
    role: Literal["prefill", "decode", "both"] = "both"  # the others are refused until there is a hand-over
    count: int = 1
    device: str = "cpu"
    devices: int = 1  # ranks of one engine
    dp_ranks: int = 1  # engines of one worker: each has weights, KV, slots, devices and threads of its own
    threads: int | None = None  # of one engine, all its ranks; None: an even share of the cores
    kv_tokens: int | None = None  # None only where kv_memory is given, or the executor's machine decides
    kv_memory: int | None = None
    snapshots: int = 64  # blocks of each STATE group beyond one per slot
    snapshot_tokens: int = 0  # states of prompts are kept each so many tokens too; 0: at ends of turns only
    slots: int = 16  # sequences with KV at a time
    step_log: str = ""  # a folder: each worker writes there what its steps computed and how long they took
    scheduler: Selection = Selection("fcfs")
    parallel: Selection = Selection("single")
    quantizer: Selection = Selection("none")
    kernels: Selection = Selection("torch")
    executor: Selection = Selection("torch")
    speculator: Selection | None = None
    speculation: SpeculationSpec = SpeculationSpec()  # how drafts are verified, and how many
    kv_store: Selection | None = None

    @property
    def engines(self) -> int:
        """Of all workers."""
        return self.count * self.dp_ranks

    def __post_init__(self) -> None:
        if self.kv_tokens is None and self.kv_memory is None and "machine" not in self.executor.parameters:
            msgspec.structs.force_setattr(self, "kv_tokens", KV_TOKENS)


class RemoteSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pool whose workers others run: in a file a [[pool]] with an `engine`."""

    engine: Selection
    name: str = "main"
    devices: int = 1  # accelerators of each worker, by which throughput is divided


class HostSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What this machine gives to all processes of the deployment together. None: all that it has left,
    within the container and the affinity of the process that starts them."""

    memory: int | None = None  # bytes; in a file also "12GiB"
    cores: int | None = None
    oversubscribe: bool = False  # take more cores, or more memory by the estimate, than there are


class GatewaySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port, printed
    max_inflight: int = 256  # requests admitted at a time; more get 503 with Retry-After
    drain_seconds: float = 30.0  # that answers under way get when `bien serve` is told to end
    # Seconds for which a worker of ours may answer nothing until it is given up, and its requests are placed
    # elsewhere; its I/O thread answers however long a step takes. 0: it is waited for without end.
    silence_seconds: float = 10.0
    secret: str = ""  # keys the tenants' hash chains
    # Hold the index against what engines find and fall back where they part: by probes too, without any, or
    # not at all. Simulations never do.
    verify: Literal["probe", "watch", "off"] = "probe"
    # Regular expressions: first lines of a system prompt that match one as a whole are taken out, so that a
    # prompt's beginning stays what it was. []: none.
    volatile_lines: tuple[str, ...] = VOLATILE_LINES
    router: Selection = Selection("kv-aware")
    kv_index: Selection = Selection("memory")
    parser: Selection | None = None  # of answers to conversations; None: as the chat template says


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that `compose()` needs. `plugins` are third-party plugins that workers load although no
    selection names them. Nothing makes what they provide: the kind that needs this, observer, is reserved."""

    model: ModelSpec = ModelSpec()
    gateway: GatewaySpec = GatewaySpec()
    pool: tuple[PoolSpec, ...] = (PoolSpec(),)
    plugins: tuple[str, ...] = ()
    host: HostSpec = HostSpec()
    remote: tuple[RemoteSpec, ...] = ()  # in a file these are pools too


_Fault = tuple[str, str]  # path and what is wrong there
POOL_KINDS = ("scheduler", "parallel", "quantizer", "kernels", "executor", "speculator", "kv_store")
GATEWAY_KINDS = ("router", "kv_index", "parser")
REMOTE_KINDS = ("engine",)
_SIZES = ("memory", "kv_memory")  # bytes, or a number with a unit


def load_deployment(source: str | Path, search: Sequence[Path] = ()) -> Deployment:
    """Read a file, or the built-in deployment `source` from the folders `search` (without ".toml").

    DeploymentError names the file or the valid names, and the full path of what is wrong inside.
    """
    path = _find(source, search)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DeploymentError(f"{path}: cannot be read as TOML: {error}") from None
    try:
        return parse_deployment(raw)
    except DeploymentError as error:
        raise DeploymentError(f"{path}: {error}", field=error.field) from None


def parse_deployment(raw: Mapping[str, Any]) -> Deployment:
    """A deployment from nested tables, decoded strictly and checked."""
    if "remote" in raw:
        raise DeploymentError("remote: is no table of a file; write [[pool]] with an engine", field="remote")
    tables = dict(raw)
    remote: tuple[RemoteSpec, ...] = ()
    if isinstance(gateway := tables.get("gateway"), Mapping):
        tables["gateway"] = _with_selections(gateway, GATEWAY_KINDS, "gateway")
    if isinstance(host := tables.get("host"), Mapping):
        tables["host"] = _with_sizes(host, "host")
    if isinstance(pools := tables.get("pool"), Mapping):
        raise DeploymentError("pool: one table; pools are a list, write [[pool]]", field="pool")
    if isinstance(pools, list):
        pools, remote = _apart(pools)
        tables["pool"] = [
            _with_sizes(_with_selections(pool, POOL_KINDS, f"pool[{i}]"), f"pool[{i}]")
            if isinstance(pool, Mapping)
            else pool
            for i, pool in enumerate(pools)
        ]
    deployment = msgspec.structs.replace(decode(tables, Deployment), remote=remote)
    check_deployment(deployment)
    return deployment


def check_deployment(deployment: Deployment) -> None:
    """DeploymentError for values that no composition can serve: counts below 1, too many workers, a
    block size that is no power of two, two pools of one name, a role that nothing serves yet."""
    for path, text in _faults(deployment):
        raise DeploymentError(f"{path}: {text}", field=path)


def _find(source: str | Path, search: Sequence[Path]) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    if path.suffix == ".toml" or len(path.parts) != 1:
        raise DeploymentError(f"no deployment file {str(source)!r}; give a .toml file or a built-in name")
    known = {file.stem: file for folder in search for file in sorted(folder.glob("*.toml"))}
    if str(source) not in known:
        raise DeploymentError(f"no built-in deployment {str(source)!r}; {nearest(str(source), known)}")
    return known[str(source)]


def _with_selections(table: Mapping[str, Any], kinds: tuple[str, ...], path: str) -> dict[str, Any]:
    return {key: _selection(v, join(path, key)) if key in kinds else v for key, v in table.items()}


def _with_sizes(table: Mapping[str, Any], path: str) -> dict[str, Any]:
    return {key: parse_size(v, join(path, key)) if key in _SIZES else v for key, v in table.items()}


def _apart(pools: list[Any]) -> tuple[list[Any], tuple[RemoteSpec, ...]]:
    """The pools of this deployment's own workers, and those of others'."""
    own, remote = [], []
    for i, pool in enumerate(pools):
        if not isinstance(pool, Mapping) or "engine" not in pool:
            own.append(pool)
            continue
        path = f"pool[{i}]"
        for key in pool:
            if key in PoolSpec.__struct_fields__ and key not in RemoteSpec.__struct_fields__:
                text = "says something of workers, which are an engine's here; valid: name, engine, devices"
                raise DeploymentError(f"{path}.{key}: {text}", field=f"{path}.{key}")
        remote.append(decode(_with_selections(pool, REMOTE_KINDS, path), RemoteSpec, path))
    return own, tuple(remote)


def _selection(value: Any, path: str) -> Selection:
    if isinstance(value, str):
        value = {"use": value}
    if not isinstance(value, Mapping):
        raise DeploymentError(
            f'{path}: expected the name of a plugin, or a table with `use = "name"` and its parameters, '
            f"got {value!r}",
            field=path,
        )
    use = value.get("use")
    if not isinstance(use, str) or not use:
        text = f"expected a plugin's name, got {use!r}" if "use" in value else 'missing; write `use = "name"`'
        raise DeploymentError(f"{path}.use: {text}", field=f"{path}.use")
    return Selection(use, {key: v for key, v in value.items() if key != "use"})


def _faults(deployment: Deployment) -> Iterator[_Fault]:
    model, gateway, pools = deployment.model, deployment.gateway, deployment.pool
    block = model.block_tokens
    if not model.name:
        yield "model.name", "is empty; give a built-in name or a folder"
    if model.dtype not in DTYPES:
        yield "model.dtype", f"{model.dtype!r} is not a dtype; {nearest(model.dtype, DTYPES)}"
    if block < 1 or block & (block - 1):
        yield "model.block_tokens", f"{block} is not a power of two (1, 2, 4, …; usual: 16 or 64)"
    yield from _below("model", {"max_context": model.max_context}, 1)
    yield from _above("model", {"max_context": model.max_context}, MOST_TOKENS)
    if not 0 <= gateway.port <= 65535:
        yield "gateway.port", f"{gateway.port} is not a port; valid: 0 (any free one) to 65535"
    yield from _below("gateway", {"max_inflight": gateway.max_inflight}, 1)
    if not 0 <= gateway.drain_seconds < math.inf:  # written so that NaN is refused
        yield "gateway.drain_seconds", f"{gateway.drain_seconds:g} is no time; valid: 0 seconds or more"
    if not 0 <= gateway.silence_seconds < math.inf:
        yield "gateway.silence_seconds", f"{gateway.silence_seconds:g} is no time; valid: 0 seconds or more"
    for at, pattern in enumerate(gateway.volatile_lines):
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"gateway.volatile_lines[{at}]", f"{pattern!r} is no regular expression: {error}"
    yield from _below("host", {"memory": deployment.host.memory, "cores": deployment.host.cores}, 1)
    if not pools and not deployment.remote:
        yield "pool", "no pool; a deployment needs at least one [[pool]]"
    names = [*(pool.name for pool in pools), *(remote.name for remote in deployment.remote)]
    for remote in deployment.remote:
        if not remote.name or names.count(remote.name) > 1:
            text = f"a pool of an engine is named {remote.name!r}; valid: a name that no other pool has"
            yield "pool", text
        yield from _below(f"pool {remote.name!r}", {"devices": remote.devices}, 1)
    for i, pool in enumerate(pools):
        path = f"pool[{i}]"
        ones = {key: getattr(pool, key) for key in ("count", "devices", "dp_ranks", "threads", "slots")}
        yield from _below(path, ones, 1)
        if pool.dp_ranks > 1 and pool.devices > 1:
            text = f"{pool.dp_ranks} engines of {pool.devices} devices each are not there yet in one worker"
            yield f"{path}.dp_ranks", f"{text}; valid: 1, with a higher count"
        states = {"snapshots": pool.snapshots, "snapshot_tokens": pool.snapshot_tokens}
        yield from _below(path, states, 0)
        if 0 < pool.snapshot_tokens < block:
            text = f"{pool.snapshot_tokens} is less than one block of model.block_tokens = {block}"
            yield f"{path}.snapshot_tokens", f"{text}; valid: 0 or at least {block}"
        yield from _below(path, {"kv_tokens": pool.kv_tokens}, block, "one block of model.block_tokens")
        yield from _above(path, {"kv_tokens": pool.kv_tokens}, MOST_TOKENS)
        yield from _below(path, {"kv_memory": pool.kv_memory}, 1)
        if pool.kv_tokens is not None and pool.kv_memory is not None:
            both = f"kv_tokens = {pool.kv_tokens} and kv_memory = {pool.kv_memory:,} bytes are both given"
            yield f"{path}.kv_memory", f"{both}; valid: one of them"
        if pool.role != "both":
            text = f"{pool.role!r} is not there yet: no worker hands a prefill over to another; valid: both"
            yield f"{path}.role", text
        if not pool.name:
            yield f"{path}.name", "is empty"
        if pool.name in [p.name for p in pools[:i]]:
            yield f"{path}.name", f"{pool.name!r} is the name of an earlier pool; names must differ"
    if (workers := sum(pool.count for pool in pools)) > MAX_WORKERS:
        where = "pool[0].count" if len(pools) == 1 else "pool"
        yield where, f"{workers} workers are too many; valid: 1 to {MAX_WORKERS}, in all pools together"


def _below(path: str, values: Mapping[str, int | None], least: int, why: str = "") -> Iterator[_Fault]:
    for key, value in values.items():
        if value is not None and value < least:
            yield f"{path}.{key}", f"{value} is too small; the least is {least}{f' ({why})' if why else ''}"


def _above(path: str, values: Mapping[str, int | None], most: int) -> Iterator[_Fault]:
    for key, value in values.items():
        if value is not None and value > most:
            yield f"{path}.{key}", f"{value} is too large; the most is {most}"
