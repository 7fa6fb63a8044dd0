"""What a gateway does in Redis for its reservations, each in one step."""

from __future__ import annotations

RESERVE = """
-- KEYS the gateway's own loads, then those of the others
-- ARGV lease ms, how many changes of its own, place and change of each; then of each request: how many bids,
--      and place, cost, wait and work of each
-- Of each request: which bid it is (from 0), and what had been reserved at the place of each
local at = 3 + 2 * ARGV[2]
for i = 3, at - 1, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
local answer = {}
while at < #ARGV do
  local places, loads, first = {}, {}, at + 1
  at = first + 4 * ARGV[at]
  for i = first, at - 1, 4 do
    places[#places + 1] = ARGV[i]
    loads[#places] = 0
  end
  for _, key in ipairs(KEYS) do
    for i, value in ipairs(redis.call('HMGET', key, unpack(places))) do
      if value then loads[i] = loads[i] + math.max(0, tonumber(value)) end
    end
  end
  local best, lowest = 0, math.huge
  for i = 1, #places do
    local bid = first + 4 * i - 4
    local price = ARGV[bid + 1] + math.max(tonumber(ARGV[bid + 2]), loads[i])
    if price < lowest then best, lowest = i, price end
  end
  redis.call('HINCRBY', KEYS[1], places[best], ARGV[first + 4 * best - 1])
  answer[#answer + 1] = best - 1
  for i = 1, #loads do answer[#answer + 1] = loads[i] end
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return answer
"""

MEET = """
-- KEYS gateways, the gateway's own loads
-- ARGV gateway, lease ms
-- Whether it was not there, then all gateways
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
local new = redis.call('ZADD', KEYS[1], ms, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ms - ARGV[2])
for key = 1, 2 do redis.call('PEXPIRE', KEYS[key], ARGV[2]) end
local answer = {new}
for _, gateway in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do answer[#answer + 1] = gateway end
return answer
"""

WRITE = """
-- KEYS the gateway's own loads
-- ARGV lease ms, place and load of each place that has one
redis.call('DEL', KEYS[1])
if #ARGV == 1 then return end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""

CHANGE = """
-- KEYS the gateway's own loads
-- ARGV lease ms, then place and change of each
for i = 2, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""

LEAVE = """
-- KEYS gateways, the gateway's own loads
-- ARGV gateway
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
"""
