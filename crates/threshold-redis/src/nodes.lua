#!lua
-- Records a heartbeat of a node, and returns the nodes whose last one still counts.
--
-- KEYS: the sorted set of nodes by the time of their last heartbeat, and the hash of what each node says of itself: when it joined,
-- when it sent the last heartbeat whose answer it has read, the key ids of its secrets, and its name. The field "since" of the hash is the time since which nodes have sent heartbeats
-- without a long pause.
-- ARGV: the id of this node, how many milliseconds a heartbeat counts, when this node joined (0: now), the time in the
-- last answer that it has read, the key id of its secret, that of its old secret or "-", and its name.
-- Returns the time in milliseconds, the time since which heartbeats have come, 1 if this node was in the set before, and for each
-- node its id, the time of its last heartbeat, and what it says of itself. That is empty for a node of an earlier version.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local life = tonumber(ARGV[2])
local function text(number)
  return string.format('%.0f', number)
end
local flat, said = redis.call('HGETALL', KEYS[2]), {}
for i = 1, #flat, 2 do
  said[flat[i]] = flat[i + 1]
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. text(now - life))
-- A clock that was set back would keep nodes that have left for as long as it was ahead.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. text(now), '+inf')
local was_listed = redis.call('ZSCORE', KEYS[1], ARGV[1])
local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
local since = tonumber(said.since)
-- Nobody has reached this server for long, or its data is new: nodes that are alive may be missing in the set.
if not since or since > now or not last or now - tonumber(last) > life / 2 then
  since = now
end
local joined = tonumber(ARGV[3])
if joined == 0 or joined > now then
  joined = now
end
said[ARGV[1]] = table.concat({ text(joined), ARGV[4], ARGV[5], ARGV[6], ARGV[7] }, ' ')
redis.call('ZADD', KEYS[1], text(now), ARGV[1])
redis.call('HSET', KEYS[2], 'since', text(since), ARGV[1], said[ARGV[1]])
local beats, members = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES'), {}
for i = 1, #beats, 2 do
  local id = beats[i]
  members[#members + 1] = id
  members[#members + 1] = beats[i + 1]
  members[#members + 1] = said[id] or ''
  said[id] = nil
end
for id in pairs(said) do
  if id ~= 'since' then
    redis.call('HDEL', KEYS[2], id)
  end
end
redis.call('PEXPIRE', KEYS[1], life)
redis.call('PEXPIRE', KEYS[2], life)
return { text(now), text(since), was_listed and '1' or '0', members }
