#!lua flags=allow-oom
-- Records the key ids of a node's secrets, and retires those that no node needs any more. A node whose secret is unknown or retired
-- is refused.
--
-- KEYS: the set of the key ids in force; the hash of rotations: "present" is the key id that the last one led to, and
-- "retired:ID" the time in milliseconds at which ID was retired, and by which one; the set of nodes and the hash of what they say of
-- themselves, as in nodes.lua.
-- ARGV: the key id of the node's secret, that of the secret before or "-", and how many milliseconds a heartbeat counts with
-- "start" if the node is being started, or "connect".
-- Returns a word and more:
--   ok, and when and by which key id the node's old secret was retired, if it was
--   other, and the key ids in force: none of them is the node's
--   retired, and when and by which key id the node's secret was retired
--   mixed, the name of a node that has only an old secret, and its key id
-- A node that has joined under the name of another one, after the last heartbeat of that one, has taken its place.
--
-- A server without memory lets it pass: it is run at every connect, and a node that cannot connect cannot read bans either.
local present, old = ARGV[1], ARGV[2]
local life, occasion = string.match(ARGV[3], '^(%d+) (%a+)$')
local starts = occasion == 'start'
local stored, in_force = redis.call('SMEMBERS', KEYS[1]), {}
for _, id in ipairs(stored) do
  in_force[id] = true
end
local flat, rotation = redis.call('HGETALL', KEYS[2]), {}
for i = 1, #flat, 2 do
  rotation[flat[i]] = flat[i + 1]
end
local retired = rotation['retired:' .. present]

-- Makes this node's secret the one that others are replaced by.
local function lead()
  redis.call('SADD', KEYS[1], present)
  redis.call('HDEL', KEYS[2], 'retired:' .. present)
  redis.call('HSET', KEYS[2], 'present', present)
  in_force[present], rotation.present = true, present
end

if #stored == 0 then
  -- The rest of a set that was deleted by hand.
  redis.call('DEL', KEYS[2])
  rotation = {}
  lead()
  if old ~= '-' then
    -- Other nodes may have only this one until they are restarted.
    redis.call('SADD', KEYS[1], old)
  end
elseif not in_force[present] then
  if not in_force[old] then
    if retired then
      return { 'retired', retired }
    end
    return { 'other', unpack(stored) }
  end
  -- A rotation, back to a retired secret too. That one takes a start, so that nothing is undone by a lost connection.
  if starts or not retired then
    lead()
  end
elseif starts and rotation.present ~= present and (in_force[old] or (not rotation.present and #stored == 1)) then
  lead()
end

-- The end of a rotation. One that leads to another secret is not ended by a node that was restarted with its old settings.
local is_end = old == '-' and in_force[present] and (rotation.present == present or not rotation.present)
if is_end and next(in_force, next(in_force)) then
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  local is_needed = false
  local beats = redis.call('ZRANGEBYSCORE', KEYS[3], string.format('%.0f', now - life), '+inf', 'WITHSCORES')
  local nodes, latest = {}, {}
  for i = 1, #beats, 2 do
    local said = redis.call('HGET', KEYS[4], beats[i]) or ''
    local joined, own, before, name = string.match(said, '^(%d+) %d+ (%S+) (%S+) (.*)$')
    nodes[#nodes + 1] = { tonumber(beats[i + 1]), own, before, name }
    if name then
      latest[name] = math.max(latest[name] or 0, tonumber(joined))
    end
  end
  for _, node in ipairs(nodes) do
    local beat, own, before, name = node[1], node[2], node[3], node[4]
    local is_replaced = name and latest[name] > beat
    if own ~= present and not is_replaced then
      -- This node, or one of an earlier version, which says nothing of its secrets.
      is_needed = true
      if starts and own and before ~= present then
        return { 'mixed', name, own }
      end
    end
  end
  if not is_needed then
    for id in pairs(in_force) do
      if id ~= present then
        redis.call('SREM', KEYS[1], id)
        redis.call('HSET', KEYS[2], 'retired:' .. id, string.format('%.0f %s', now, present))
      end
    end
    redis.call('HSET', KEYS[2], 'present', present)
  end
end
return { 'ok', rotation['retired:' .. old] or '' }
