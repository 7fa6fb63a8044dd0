"""What a gateway does in Redis for its reservations, each in one step."""

from __future__ import annotations

RESERVE = """
-- KEYS the gateway's own, then those of the others
-- ARGV lease ms, how many of its own to set right, place and time of each; then of each request: how many
--      bids, and place, cost, wait and work of each
-- Of each request: which bid it is (from 0), until when, and what had been reserved at the place of each
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local at = 3 + 2 * ARGV[2]
if at > 3 then redis.call('HSET', KEYS[1], unpack(ARGV, 3, at - 1)) end
local answer = {}
while at < #ARGV do
  local places, loads, own, first = {}, {}, {}, at + 1
  at = first + 4 * ARGV[at]
  for i = first, at - 1, 4 do
    places[#places + 1] = ARGV[i]
    loads[#places] = 0
  end
  for k, key in ipairs(KEYS) do
    for i, value in ipairs(redis.call('HMGET', key, unpack(places))) do
      if k == 1 then own[i] = tonumber(value or 0) end
      if value then loads[i] = loads[i] + math.max(0, value - now) end
    end
  end
  local best, lowest = 0, math.huge
  for i = 1, #places do
    local bid = first + 4 * i - 4
    local price = ARGV[bid + 1] + math.max(tonumber(ARGV[bid + 2]), loads[i])
    if price < lowest then best, lowest = i, price end
  end
  local till = math.max(now, own[best]) + ARGV[first + 4 * best - 1]
  redis.call('HSET', KEYS[1], places[best], string.format('%.0f', till))
  answer[#answer + 1] = best - 1
  answer[#answer + 1] = till
  for i = 1, #loads do answer[#answer + 1] = loads[i] end
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return answer
"""

MEET = """
-- KEYS gateways, the gateway's own
-- ARGV gateway, lease ms, then places of its own that are past
-- Whether it was not there, the time, then all gateways
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
if #ARGV > 2 then redis.call('HDEL', KEYS[2], unpack(ARGV, 3)) end
local new = redis.call('ZADD', KEYS[1], ms, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ms - ARGV[2])
for key = 1, 2 do redis.call('PEXPIRE', KEYS[key], ARGV[2]) end
local answer = {new, now[1] * 1000000 + now[2]}
for _, gateway in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do answer[#answer + 1] = gateway end
return answer
"""

LEAVE = """
-- KEYS gateways, the gateway's own
-- ARGV gateway
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
"""
