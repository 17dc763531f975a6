#!lua flags=no-writes
-- Returns those commands of the scripts that the user may not run. A script whose second write is refused has written half of a step.
if not redis.acl_check_cmd then
  return {}
end
local key, refused = 'th:{control}', {}
for command in string.gmatch([[
  DEL EXISTS GET HDEL HGET HGETALL HINCRBY HMGET HSET HSETNX MGET PEXPIRE PEXPIREAT PEXPIRETIME SADD SET SMEMBERS SREM TIME
  ZADD ZCARD ZRANGE ZRANGEBYSCORE ZREM ZREMRANGEBYSCORE ZSCORE
]], '%a+') do
  if not redis.acl_check_cmd(command, key, key, key) then
    refused[#refused + 1] = command
  end
end
return refused
