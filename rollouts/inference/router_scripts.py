"""The router's Lua scripts: each is one atomic step in the shared store, by the store's clock."""

# KEYS: sticky, turn order, servers, then per candidate its leases and its breaker.
# ARGV: lease token, lease ms, sticky ms, then per candidate its id and its limit.
# Returns the place of the chosen candidate from 1, or 0 when none has a free slot.
ACQUIRE = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
local sticky = redis.call('GET', KEYS[1])
local best, best_load, best_turn = 0, 0, 0
local count = (#KEYS - 3) / 2
for place = 1, count do
  local leases, breaker = KEYS[2 + place * 2], KEYS[3 + place * 2]
  local id, limit = ARGV[2 + place * 2], tonumber(ARGV[3 + place * 2])
  redis.call('ZREMRANGEBYSCORE', leases, '-inf', now)
  local load = redis.call('ZCARD', leases)
  local down_until = tonumber(redis.call('HGET', breaker, 'down_until') or '0')
  -- After its cool-off a server that was down gets one request, until it succeeds.
  if down_until > 0 then limit = math.min(limit, 1) end
  if now >= down_until and load < limit then
    if id == sticky then best = place break end
    local turn = tonumber(redis.call('ZSCORE', KEYS[2], id) or '0')
    if best == 0 or load < best_load or (load == best_load and turn < best_turn) then
      best, best_load, best_turn = place, load, turn
    end
  end
end
if best == 0 then return 0 end
local id, leases = ARGV[2 + best * 2], KEYS[2 + best * 2]
local lease = tonumber(ARGV[2])
redis.call('ZADD', leases, now + lease, ARGV[1])
redis.call('PEXPIRE', leases, math.max(redis.call('PTTL', leases), lease))
redis.call('SET', KEYS[1], id, 'PX', ARGV[3])
local last = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')
redis.call('ZADD', KEYS[2], (tonumber(last[2]) or 0) + 1, id)
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('SADD', KEYS[3], id)
return best
"""

# KEYS: leases. ARGV: lease token, lease ms. Returns 1, or 0 when the lease had ended.
RENEW = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
local ends = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or '0')
if ends <= now then return 0 end
redis.call('ZADD', KEYS[1], 'XX', now + tonumber(ARGV[2]), ARGV[1])
redis.call('PEXPIRE', KEYS[1], math.max(redis.call('PTTL', KEYS[1]), tonumber(ARGV[2])))
return 1
"""

# KEYS: breaker. ARGV: faults until down, first cool-off ms, longest cool-off ms.
# Returns how long the server is now left alone, ms. Faults of requests that were under way
# when it went down count once.
FAULT = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
local down_until = tonumber(redis.call('HGET', KEYS[1], 'down_until') or '0')
if down_until > now then return down_until - now end
local faults = redis.call('HINCRBY', KEYS[1], 'faults', 1)
local over = faults - tonumber(ARGV[1])
local pause = 0
if over >= 0 then
  pause = math.min(tonumber(ARGV[2]) * 2 ^ math.min(over, 30), tonumber(ARGV[3]))
  redis.call('HSET', KEYS[1], 'down_until', now + pause)
end
redis.call('PEXPIRE', KEYS[1], pause + 10 * tonumber(ARGV[3]))
return pause
"""

# KEYS: leases of each server. Returns how many are in flight on each.
IN_FLIGHT = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
local loads = {}
for place = 1, #KEYS do
  loads[place] = redis.call('ZCOUNT', KEYS[place], '(' .. now, '+inf')
end
return loads
"""
