#!lua
-- Reads which reservations of a partition have expired. If none has, the head learns when the next one will.
--
-- KEYS: the index of the partition, its head.
-- ARGV: the largest number to return.
-- Returns the ids, each followed by its time in milliseconds.
local time = redis.call('TIME')
-- Rounded down, and scores are rounded up: no reservation is ended before its time.
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local due = redis.call('ZRANGE', KEYS[1], '-inf', string.format('%.0f', now), 'BYSCORE', 'LIMIT', 0, ARGV[1], 'WITHSCORES')
if #due == 0 then
  local head = redis.call('GET', KEYS[2])
  local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
  local next_expiry = struct.pack('>I8', first[2] and tonumber(first[2]) * 1000 or 0)
  if head and string.byte(head) == 1 and string.sub(head, 10) ~= next_expiry then
    redis.call('SET', KEYS[2], string.sub(head, 1, 9) .. next_expiry)
  end
end
return due
