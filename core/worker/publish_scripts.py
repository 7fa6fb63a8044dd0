"""What a publisher does in Redis, each in one step. A worker writes only while the lease is its own: after a
newer life of it has taken the lease, the older one is fenced off."""

from __future__ import annotations

CLAIM = """
-- KEYS lease, snapshot, events, workers
-- ARGV generation, lease ms, keep ms, take ("1": from whoever holds it), worker, most bytes of the stream,
--      how many fields of batch numbers, these, then fields and values of the lease
-- Among others: the numbers that stood there, "0" where the lease is new
local held = redis.call('HGET', KEYS[1], 'generation')
if held and held ~= ARGV[1] and ARGV[4] == '0' then return {'fenced', held} end
local state = 'held'
if held ~= ARGV[1] then  -- it had expired, or was another life's
  redis.call('DEL', KEYS[1], KEYS[2])
  state = 'new'
end
local seqs, first = {}, 8 + ARGV[7]
for i = 8, first - 1 do
  seqs[i - 7] = state == 'held' and redis.call('HGET', KEYS[1], ARGV[i]) or '0'
end
redis.call('HSET', KEYS[1], unpack(ARGV, first))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
for key = 2, 3 do redis.call('PEXPIRE', KEYS[key], ARGV[3]) end
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZADD', KEYS[4], ms, ARGV[5])
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', ms - ARGV[3])
redis.call('PEXPIRE', KEYS[4], ARGV[3])
local used = redis.pcall('MEMORY', 'USAGE', KEYS[3])  -- some servers forbid it
if type(used) == 'number' and used > tonumber(ARGV[6]) then
  local length = redis.call('XLEN', KEYS[3])
  redis.call('XTRIM', KEYS[3], 'MAXLEN', math.floor(length * ARGV[6] / used * 0.75))
end
local oldest = redis.call('XRANGE', KEYS[3], '-', '+', 'COUNT', 1)
local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
return {state, oldest[1] and oldest[1][1] or '', last[1] and last[1][1] or '0-0',
        redis.call('EXISTS', KEYS[2]), ms, seqs}
"""

APPEND = """
-- KEYS lease, events
-- ARGV generation, most entries, field and number of the last batch, keep ms ("": it is known to expire),
--      entry
local held = redis.call('HGET', KEYS[1], 'generation')
if held ~= ARGV[1] then return {held and 'fenced' or 'lost', held or ''} end
local id = redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'd', ARGV[6])
redis.call('HSET', KEYS[1], ARGV[3], ARGV[4])
if ARGV[5] ~= '' then redis.call('PEXPIRE', KEYS[2], ARGV[5]) end
return {'held', id}
"""

SNAPSHOT = """
-- KEYS lease, snapshot
-- ARGV generation, dp_rank, keep ms, snapshot (empty: there is none)
local held = redis.call('HGET', KEYS[1], 'generation')
if held ~= ARGV[1] then return {held and 'fenced' or 'lost', held or ''} end
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[2], ARGV[2])
else
  redis.call('HSET', KEYS[2], ARGV[2], ARGV[4])
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
end
return {'held', ''}
"""

RELEASE = """
-- KEYS lease, snapshot, workers
-- ARGV generation, worker
if redis.call('HGET', KEYS[1], 'generation') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('ZREM', KEYS[3], ARGV[2])
return 1
"""
