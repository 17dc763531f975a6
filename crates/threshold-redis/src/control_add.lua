#!lua
-- Adds changes of bans and settings to the log, each in place of the one with the same key, all or none. The same as
-- `ControlLog::add_all` in core. Many changes come in several calls, one node's at a time; single changes go on meanwhile.
--
-- KEYS: meta (a hash with the last number, the last forgotten one and when the log began), order (keys by number), changes (bytes by key),
--   removals (keys by the time of their removal), bans and settings (keys by when they end), import (the id of the changes in
--   several calls that are under way).
-- ARGV: the largest number of bans, that of settings, how long a removal is kept in milliseconds, the largest number of removals;
--   how long an import may be under way without another call in milliseconds, the number that must be the last one ('' for any),
--   the id of the import ('' for a single change), 'first' or 'later', 'last' or 'more'; for each change its key, its bytes, and when it ends in Unix milliseconds ('' for a removal). The key of a ban begins with 'b'.
-- Returns the number of the last change, nothing if there is no room, or why nothing was changed: 'outdated' if there are changes
-- after that number, 'busy' while another import is under way, 'expired' if another one has begun since the last call.
local meta, order, changes, removals, bans, settings, import = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local most = { [bans] = tonumber(ARGV[1]), [settings] = tonumber(ARGV[2]) }
local kept_for, most_removals = tonumber(ARGV[3]), tonumber(ARGV[4])
local lease, after, id, is_first, is_last = ARGV[5], ARGV[6], ARGV[7], ARGV[8] == 'first', ARGV[9] == 'last'
local FIRST = 10
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function ends_of(key)
  return string.sub(key, 1, 1) == 'b' and bans or settings
end

local function drop(member)
  redis.call('ZREM', order, member)
  redis.call('HDEL', changes, member)
end

-- Only the result has to have room: a set can be replaced by another one in a full log.
local function has_room()
  local final = {}
  for i = FIRST, #ARGV, 3 do
    final[ARGV[i]] = ARGV[i + 2] ~= ''
  end
  local added = { [bans] = 0, [settings] = 0 }
  for key, is_set in pairs(final) do
    local ends = ends_of(key)
    local was_set = redis.call('ZSCORE', ends, key) and true or false
    if is_set ~= was_set then
      added[ends] = added[ends] + (is_set and 1 or -1)
    end
  end
  for ends, more in pairs(added) do
    local count = redis.call('ZCARD', ends)
    if count + more > math.max(most[ends], count) then
      return false
    end
  end
  return true
end

if id ~= '' then
  local under_way = redis.call('GET', import)
  if is_first and under_way and under_way ~= id then
    return 'busy'
  elseif not is_first and under_way ~= id then
    return 'expired'
  elseif after ~= '' and after ~= (redis.call('HGET', meta, 'last') or '0') then
    return 'outdated'
  end
end

if not has_room() then
  for _, ends in ipairs({ bans, settings }) do
    for _, over in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now)) do
      redis.call('ZREM', ends, over)
      drop(over)
    end
  end
  if not has_room() then
    return false
  end
end

if id ~= '' and not is_last then
  redis.call('SET', import, id, 'PX', lease)
elseif id ~= '' then
  redis.call('DEL', import)
end
if #ARGV >= FIRST then
  -- Text, because a number of this size would be rounded.
  redis.call('HSETNX', meta, 'began', time[1] .. string.format('%06d', tonumber(time[2])))
end
local number
for i = FIRST, #ARGV, 3 do
  local key, bytes, until_ms = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  number = redis.call('HINCRBY', meta, 'last', 1)
  redis.call('ZADD', order, number, key)
  redis.call('HSET', changes, key, bytes)
  if until_ms == '' then
    redis.call('ZREM', ends_of(key), key)
    redis.call('ZADD', removals, now, key)
  else
    redis.call('ZADD', ends_of(key), until_ms, key)
    redis.call('ZREM', removals, key)
  end
end

-- A node that has not read a removal would keep the ban for ever. By `forgotten` it learns to read everything again.
while true do
  local oldest = redis.call('ZRANGE', removals, 0, 0, 'WITHSCORES')
  local kept = redis.call('ZCARD', removals)
  if kept == 0 or (tonumber(oldest[2]) + kept_for > now and kept <= most_removals) then
    break
  end
  local forgotten = math.max(tonumber(redis.call('ZSCORE', order, oldest[1])), tonumber(redis.call('HGET', meta, 'forgotten') or 0))
  redis.call('HSET', meta, 'forgotten', string.format('%.0f', forgotten))
  redis.call('ZREM', removals, oldest[1])
  drop(oldest[1])
end
return number or tonumber(redis.call('HGET', meta, 'last') or 0)
