"""Which torch module runs an architecture, and which quantized checkpoints are read. No torch: `inspect`
asks too."""

from __future__ import annotations

# Values of `quant_method` in a checkpoint's quantization_config.
METHODS = ("fp8", "compressed-tensors", "mxfp4", "modelopt")
# Architecture name -> "module:class", imported when a model of it is loaded.
MODELS = {
    "llama": "bien.core.models.llama:Llama",
    "qwen3": "bien.core.models.llama:Llama",
    "qwen3_moe": "bien.core.models.qwen3_moe:Qwen3Moe",
    "glm4_moe": "bien.core.models.glm4_moe:Glm4Moe",
    "gpt_oss": "bien.core.models.gpt_oss:GptOss",
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2", "kimi_k25"),
        "bien.core.models.deepseek:Deepseek",
    ),
    **dict.fromkeys(("kimi_linear", "kimi_k3"), "bien.core.models.kimi_linear:KimiLinear"),
    "tiny_hybrid": "bien.core.models.tiny_hybrid:TinyHybrid",
}
