"""The router's Lua scripts: each is one atomic step in the shared store, by the store's clock.

What is in the store, below one prefix that is the only declared key (it carries the hash tag, so
every key lies on the same node):

- `leases:S` (token → its end, ms) and `work:S` (`t:TOKEN` → tokens:experiment, `e:EXPERIMENT`
  and `sum` → tokens in flight) of a server S; they end together, so they never disagree for long;
- `breaker:S` (`faults`, `down_until`, `trial`: the lease that tries it out), `turns` (S → when it
  was last chosen), `servers`;
- `sticky:R` of a rollout R: its server, and how many of its tokens that server has seen;
- `queue:P:…` of a pool P: `leases` (waiter → the end of its patience), `info` (waiter → JSON),
  `shares` (experiment → share, of those that wait), `servers` (S → limit), `seq`, and per
  experiment `e:E` (waiter → its number);
- `grant:TOKEN`: the server that a waiter was given, until it fetches it.
"""

# A sticky server is left once its tokens in flight exceed this many times what the least busy
# one would have with this request. Lower values lose prefixes for differences that mean nothing.
STICKY_OVERLOAD = 4
# How many waiters of one experiment are tried for a free slot, where the first avoid its server.
LOOK_AHEAD = 64
# A waiter whose prompt's beginning is where a slot is free goes before those of its experiment that
# would read theirs anew there, if it came at most so many requests after the first of them. It
# gains (benchmarks/results/routing.md); more places gain more, and let others wait for longer.
OVERTAKE = 4

_CLOCK = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
"""

_SERVERS = (
    _CLOCK
    + """
local P = KEYS[1]
local KEEP = 3600000
local known = {}

local function keep(key, ms) redis.call('PEXPIRE', key, math.max(redis.call('PTTL', key), ms)) end

local function forget(id, token)
  local work = P .. ':work:' .. id
  redis.call('ZREM', P .. ':leases:' .. id, token)
  local entry = redis.call('HGET', work, 't:' .. token)
  if not entry then return end
  local tokens, experiment = string.match(entry, '^(%d+):(.*)$')
  redis.call('HDEL', work, 't:' .. token)
  redis.call('HINCRBY', work, 'sum', -tokens)
  if redis.call('HINCRBY', work, 'e:' .. experiment, -tokens) <= 0 then
    redis.call('HDEL', work, 'e:' .. experiment)
  end
end

local function state(id)
  local s = known[id]
  if s then return s end
  local leases, work = P .. ':leases:' .. id, P .. ':work:' .. id
  for _, token in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do forget(id, token) end
  local count = redis.call('ZCARD', leases)
  if count == 0 then redis.call('DEL', work) end
  local breaker = redis.call('HMGET', P .. ':breaker:' .. id, 'down_until', 'trial')
  s = {count = count, sum = tonumber(redis.call('HGET', work, 'sum') or '0'),
       down = tonumber(breaker[1] or '0'),
       trial = breaker[2] and redis.call('ZSCORE', leases, breaker[2]) and true,
       turn = tonumber(redis.call('ZSCORE', P .. ':turns', id) or '0')}
  known[id] = s
  return s
end

local function room(id, limit)
  local s = state(id)
  -- After its cool-off a server that was down gets one new request at a time, until one succeeds;
  -- those that were under way before may yet take long.
  return now >= s.down and s.count < limit and not (s.down > 0 and s.trial)
end
"""
)

_QUEUE = (
    _SERVERS
    + f"local OVERLOAD, AHEAD = {STICKY_OVERLOAD}, {LOOK_AHEAD}\n"
    + """
local function less(a, b)
  if a.sum ~= b.sum then return a.sum < b.sum end
  if a.count ~= b.count then return a.count < b.count end
  return a.turn < b.turn
end

-- Return the server for a waiter, its tokens there, and what it loses there: 1 nothing, 2 nothing
-- as it has no server yet, 3 what its server has seen. Nil when none has room.
local function choose(w)
  local home = redis.call('HMGET', P .. ':sticky:' .. w.rollout, 'server', 'tokens')
  local best, at_home
  for _, pair in ipairs(w.servers) do
    local id = pair[1]
    if room(id, pair[2]) then
      if id == home[1] then at_home = id end
      if not best or less(state(id), state(best)) then best = id end
    end
  end
  local cold = w.tokens + w.prompt
  if at_home and state(at_home).sum <= OVERLOAD * (state(best).sum + cold) then
    return at_home, w.tokens + math.max(0, w.prompt - tonumber(home[2])), 1
  end
  return best, cold, home[1] and 3 or 2
end

local function lease(w, id, tokens)
  local leases, work = P .. ':leases:' .. id, P .. ':work:' .. id
  local sticky = P .. ':sticky:' .. w.rollout
  redis.call('ZADD', leases, now + w.lease, w.token)
  redis.call('HSET', work, 't:' .. w.token, tokens .. ':' .. w.experiment)
  redis.call('HINCRBY', work, 'sum', tokens)
  redis.call('HINCRBY', work, 'e:' .. w.experiment, tokens)
  keep(leases, w.lease)
  keep(work, w.lease)
  redis.call('HSET', sticky, 'server', id, 'tokens', w.prompt)
  redis.call('PEXPIRE', sticky, KEEP)
  local last = redis.call('ZREVRANGE', P .. ':turns', 0, 0, 'WITHSCORES')
  local turn = (tonumber(last[2]) or 0) + 1
  redis.call('ZADD', P .. ':turns', turn, id)
  redis.call('PEXPIRE', P .. ':turns', KEEP)
  redis.call('SADD', P .. ':servers', id)
  redis.call('SET', P .. ':grant:' .. w.token, id, 'PX', w.lease)
  local s = state(id)
  s.count, s.sum, s.turn = s.count + 1, s.sum + tokens, turn
  if s.down > 0 then
    redis.call('HSET', P .. ':breaker:' .. id, 'trial', w.token)
    s.trial = true
  end
end

local function dequeue(q, token)
  local text = redis.call('HGET', q .. ':info', token)
  redis.call('ZREM', q .. ':leases', token)
  if not text then return end
  local experiment = cjson.decode(text).experiment
  redis.call('HDEL', q .. ':info', token)
  redis.call('ZREM', q .. ':e:' .. experiment, token)
  if redis.call('ZCARD', q .. ':e:' .. experiment) == 0 then
    redis.call('HDEL', q .. ':shares', experiment)
  end
end

local function sweep(q)
  for _, token in ipairs(redis.call('ZRANGEBYSCORE', q .. ':leases', '-inf', now)) do
    dequeue(q, token)
  end
end

local function enqueue(q, w, text, wait)
  local mine = q .. ':e:' .. w.experiment
  if not redis.call('ZSCORE', mine, w.token) then
    redis.call('ZADD', mine, redis.call('INCR', q .. ':seq'), w.token)
  end
  redis.call('ZADD', q .. ':leases', now + wait, w.token)
  redis.call('HSET', q .. ':info', w.token, text)
  redis.call('HSET', q .. ':shares', w.experiment, w.share)
  for _, pair in ipairs(w.servers) do redis.call('HSET', q .. ':servers', pair[1], pair[2]) end
  for _, part in ipairs({':leases', ':info', ':shares', ':servers', ':seq'}) do
    redis.call('PEXPIRE', q .. part, KEEP)
  end
  redis.call('PEXPIRE', mine, KEEP)
end

-- Return the experiments that wait, first the one with the least tokens in flight per share.
local function waiting(q, ids)
  local found, shares = {}, redis.call('HGETALL', q .. ':shares')
  for at = 1, #shares, 2 do
    local experiment, used = shares[at], 0
    for _, id in ipairs(ids) do
      used = used + tonumber(redis.call('HGET', P .. ':work:' .. id, 'e:' .. experiment) or '0')
    end
    local first = redis.call('ZRANGE', q .. ':e:' .. experiment, 0, 0, 'WITHSCORES')
    found[#found + 1] = {experiment = experiment, used = used / tonumber(shares[at + 1]),
                         first = tonumber(first[2]) or 0}
  end
  table.sort(found, function(a, b)
    if a.used ~= b.used then return a.used < b.used end
    return a.first < b.first
  end)
  return found
end

-- Return who of an experiment gets a free slot: the first, or one soon after it that loses less.
local function next_of(q, experiment)
  local rows = redis.call('ZRANGE', q .. ':e:' .. experiment, 0, AHEAD - 1, 'WITHSCORES')
  local chosen
  for at = 1, #rows, 2 do
    local number = tonumber(rows[at + 1])
    if chosen and number - chosen.first > OVERTAKE then break end
    local w = cjson.decode(redis.call('HGET', q .. ':info', rows[at]))
    local id, tokens, loss = choose(w)
    if id and (not chosen or loss < chosen.loss) then
      local first = chosen and chosen.first or number
      chosen = {w = w, id = id, tokens = tokens, loss = loss, first = first}
      if loss == 1 then break end
    end
  end
  return chosen
end

-- Give one free slot to whose turn it is; say whether there was one to give.
local function give(q, ids, own)
  for _, each in ipairs(waiting(q, ids)) do
    local found = next_of(q, each.experiment)
    if found then
      local w = found.w
      dequeue(q, w.token)
      lease(w, found.id, found.tokens)
      if w.token ~= own then
        redis.call('RPUSH', P .. ':inbox:' .. w.inbox, w.token)
        redis.call('PEXPIRE', P .. ':inbox:' .. w.inbox, w.lease)
      end
      return true
    end
  end
  return false
end

local function pump(q, own)
  sweep(q)
  if redis.call('EXISTS', q .. ':shares') == 0 then return end
  local limits, ids = redis.call('HGETALL', q .. ':servers'), {}
  for at = 1, #limits, 2 do ids[#ids + 1] = limits[at] end
  repeat
    local free = false
    for at = 1, #limits, 2 do free = free or room(limits[at], tonumber(limits[at + 1])) end
  until not (free and give(q, ids, own))
end
"""
)

# ARGV: pool, the waiter as JSON, how long it may stay in the queue (ms; 0: not at all).
# Returns the id of the server whose slot it now holds, or ''.
ACQUIRE = (
    _QUEUE
    + """
local q, w, wait = P .. ':queue:' .. ARGV[1], cjson.decode(ARGV[2]), tonumber(ARGV[3])
local grant = P .. ':grant:' .. w.token
local id = redis.call('GET', grant)
if not id then
  -- Who cannot wait is in the queue too, for this one step: nobody overtakes.
  enqueue(q, w, ARGV[2], math.max(wait, 1))
  redis.call('SADD', P .. ':pools', ARGV[1])
  redis.call('PEXPIRE', P .. ':pools', KEEP)
  pump(q, w.token)
  id = redis.call('GET', grant)
end
if id then
  redis.call('DEL', grant)
  return id
end
if wait == 0 then dequeue(q, w.token) end
return ''
"""
)

# ARGV: pool, server, lease token, 1 where the server did well: its faults are forgotten before the
# slot goes on, as a server on trial takes one request only. Frees it, and gives it to whose turn it
# is.
RELEASE = (
    _QUEUE
    + """
forget(ARGV[2], ARGV[3])
if ARGV[4] == '1' then redis.call('DEL', P .. ':breaker:' .. ARGV[2]) end
redis.call('DEL', P .. ':grant:' .. ARGV[3])
pump(P .. ':queue:' .. ARGV[1], '')
"""
)

# ARGV: pool, token. Takes a waiter out of the queue, and back what it was given meanwhile.
LEAVE = (
    _QUEUE
    + """
local q, grant = P .. ':queue:' .. ARGV[1], P .. ':grant:' .. ARGV[2]
dequeue(q, ARGV[2])
local id = redis.call('GET', grant)
if id then
  redis.call('DEL', grant)
  forget(id, ARGV[2])
  pump(q, '')
end
"""
)

# ARGV: lease ms, then server and lease token of each. Returns for each 1, or 0 when it had ended.
RENEW = (
    _SERVERS
    + """
local lease, found = tonumber(ARGV[1]), {}
for at = 2, #ARGV, 2 do
  local leases = P .. ':leases:' .. ARGV[at]
  local ends = tonumber(redis.call('ZSCORE', leases, ARGV[at + 1]) or '0')
  if ends > now then
    redis.call('ZADD', leases, 'XX', now + lease, ARGV[at + 1])
    keep(leases, lease)
    keep(P .. ':work:' .. ARGV[at], lease)
  end
  found[#found + 1] = ends > now and 1 or 0
end
return found
"""
)

# ARGV: server, faults until down, first cool-off ms, longest cool-off ms.
# Returns how long the server is now left alone, ms. Faults of requests that were under way
# when it went down count once.
FAULT = (
    _CLOCK
    + """
local breaker = KEYS[1] .. ':breaker:' .. ARGV[1]
local down_until = tonumber(redis.call('HGET', breaker, 'down_until') or '0')
if down_until > now then return down_until - now end
local faults = redis.call('HINCRBY', breaker, 'faults', 1)
local over = faults - tonumber(ARGV[2])
local pause = 0
if over >= 0 then
  pause = math.min(tonumber(ARGV[3]) * 2 ^ math.min(over, 30), tonumber(ARGV[4]))
  redis.call('HSET', breaker, 'down_until', now + pause)
end
redis.call('PEXPIRE', breaker, pause + 10 * tonumber(ARGV[4]))
return pause
"""
)

# Returns, per server that was ever assigned: id, requests and tokens in flight, breaker (0 closed,
# 1 half open, 2 open).
LOAD = (
    _SERVERS
    + """
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', P .. ':servers')) do
  local s = state(id)
  local breaker = 0
  if s.down > 0 then breaker = now >= s.down and 1 or 2 end
  found[#found + 1] = {id, s.count, s.sum, breaker}
end
return found
"""
)

# Returns, per experiment that waits: id, how many of its requests do; once per pool.
WAITING = (
    _QUEUE
    + """
local found = {}
for _, pool in ipairs(redis.call('SMEMBERS', P .. ':pools')) do
  local q = P .. ':queue:' .. pool
  sweep(q)
  for _, experiment in ipairs(redis.call('HKEYS', q .. ':shares')) do
    found[#found + 1] = {experiment, redis.call('ZCARD', q .. ':e:' .. experiment)}
  end
end
return found
"""
)


def overtaking(script: str, places: int) -> str:
    """Return a script that gives slots away, with this in place of `OVERTAKE`."""
    return f"local OVERTAKE = {places}\n{script}"
