#!lua flags=allow-oom
-- Records the key id of a node's secret, unless the store was written with other secrets.
--
-- KEYS: the set of key ids.
-- ARGV: the key id of the node's secret, and that of the secret before while it is rotated.
-- Returns the stored key ids if none of them is the node's, otherwise nothing.
--
-- A server without memory lets it pass: it is run at every connect, and a node that cannot connect cannot read bans either.
local stored = redis.call('SMEMBERS', KEYS[1])
local is_known = #stored == 0
for _, id in ipairs(stored) do
  if id == ARGV[1] then
    return {}
  end
  is_known = is_known or id == ARGV[2]
end
if not is_known then
  return stored
end
redis.call('SADD', KEYS[1], ARGV[1])
return {}
