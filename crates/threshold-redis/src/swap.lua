-- Changes several records in one step, unless one of them has changed since it was read, and adds to balances whatever they are by now.
-- `charge.lua` and `adjust.lua` stand before this text.
--
-- KEYS: the records, the balances that are added to, the keys to delete, the head of the partition, then the indexes.
-- ARGV: the numbers of records, of balances and of keys to delete, and whether something is charged (1), for which the partition
--   needs a history; eight random bytes, for a partition without one ('' while it is moved: then its head is left out); for each record
--   the bytes that it must have ('' for none),
--   its new bytes ('' to delete it),
--   when it expires: Unix milliseconds, '' for never, 'keep' for the time that it has, 'as N' for that of the Nth record, or 'in N' for
--   N milliseconds from now;
-- for each balance its changes, as `Adjustment::to_script` in core packs them; for each index
--   'add N', after which the index is kept for N milliseconds, or 'remove'; the member; its score;
-- the time after which nothing is changed ('' for none).
-- Returns what was done (1: everything, 0: nothing, because a record has changed, 2: nothing, because the script cannot tell how a
-- balance changes, 3: nothing, because it is too late, 4: nothing, because a charge does not fit), the time as seconds and microseconds, the records that were found, and the
-- history of the partition.
local records, balances, deleted, charges = read('>I4I4I4B', ARGV[1])
local latest = ARGV[#ARGV]
if latest ~= '' and now > read('>I8', latest) then
  return { 3, time[1], time[2] }
end
local has_head = ARGV[2] ~= ''
local head_at = records + balances + deleted + (has_head and 1 or 0)
local keys = {}
for i = 1, records + balances do
  keys[i] = KEYS[i]
end
if has_head then
  keys[#keys + 1] = KEYS[head_at]
end
local found = #keys > 0 and call('MGET', unpack(keys)) or {}

-- MGET answers nil for a key of another type, which must not be taken for a record that is not there.
local missing = {}
for i = 1, #keys do
  if not found[i] then
    missing[#missing + 1] = keys[i]
  end
end
if #missing > 0 and call('EXISTS', unpack(missing)) > 0 then
  return redis.error_reply('WRONGTYPE a record of the store has another type')
end
-- Fails before the first write if an index has another type.
for i = head_at + 1, #KEYS do
  call('ZCARD', KEYS[i])
end
-- And if the user may not write something. Most calls need all of them.
for _, command in ipairs(redis.acl_check_cmd and { 'SET', 'DEL', 'ZADD', 'ZREM', 'PEXPIREAT' } or {}) do
  if not redis.acl_check_cmd(command, KEYS[1], KEYS[1], KEYS[1]) then
    return redis.error_reply('NOPERM the user may not run a command of the script')
  end
end
local head = has_head and found[#keys]
if head and byte(head) ~= 1 then
  return redis.error_reply('ERR a record of the store has an unknown version')
end
local history = head and sub(head, 2, 9) or '\0\0\0\0\0\0\0\0'
local theirs = {}
for i = 1, records do
  theirs[i] = found[i]
end

local FIRST = 3
for i = 1, records do
  if (found[i] or '') ~= ARGV[FIRST + 3 * (i - 1)] then
    return { 0, time[1], time[2], theirs, history }
  end
end

local first_change = FIRST + 3 * records
local news, silents = {}, {}
for i = 1, balances do
  local new, silent = adjust(KEYS[records + i], found[records + i] or nil, ARGV[first_change + i - 1], history)
  if new == false then
    -- Here `silent` says whether a charge does not fit.
    return { silent and 4 or 2, time[1], time[2] }
  end
  news[i], silents[i] = new, silent
end

-- Times are read before the first write, because a record that another one takes its time from may be deleted.
local expiry = {}
for i = 1, records do
  local ends = ARGV[FIRST + 3 * (i - 1) + 2]
  local other, length = string.match(ends, '^as (%d+)$'), string.match(ends, '^in (%d+)$')
  if other then
    local own = call('PEXPIRETIME', KEYS[tonumber(other)])
    ends = own > 0 and format('%.0f', own) or ''
  elseif length then
    ends = format('%d', now / 1000 + tonumber(length) + 1)
  end
  expiry[i] = ends
end
for i = 1, records do
  local bytes, ends = ARGV[FIRST + 3 * (i - 1) + 1], expiry[i]
  if bytes == '' then
    call('DEL', KEYS[i])
  elseif ends == '' then
    call('SET', KEYS[i], bytes)
  elseif ends == 'keep' then
    call('SET', KEYS[i], bytes, 'KEEPTTL')
  else
    call('SET', KEYS[i], bytes, 'PXAT', ends)
  end
end
for i = 1, balances do
  local new, silent = news[i], silents[i]
  if new == '' then
    call('DEL', KEYS[records + i])
  elseif new and silent then
    call('SET', KEYS[records + i], new, 'PXAT', format('%d', (silent + 999) / 1000))
  elseif new then
    call('SET', KEYS[records + i], new, 'KEEPTTL')
  end
end
for i = records + balances + 1, records + balances + deleted do
  call('DEL', KEYS[i])
end
local first_index, next_expiry = first_change + balances, head and read('>I8', head, 10) or 0
for i = head_at + 1, #KEYS do
  local place = first_index + 3 * (i - head_at - 1)
  local verb, member, score = ARGV[place], ARGV[place + 1], ARGV[place + 2]
  local kept = string.match(verb, '^add (%d+)$')
  if kept then
    call('ZADD', KEYS[i], score, member)
    -- An index outlives its last member. 'GT' alone would leave a new index without a time.
    local ends = format('%.0f', tonumber(score) + tonumber(kept))
    call('PEXPIREAT', KEYS[i], ends, 'NX')
    call('PEXPIREAT', KEYS[i], ends, 'GT')
  else
    call('ZREM', KEYS[i], member)
  end
  local first = call('ZRANGE', KEYS[i], 0, 0, 'WITHSCORES')
  next_expiry = first[2] and tonumber(first[2]) * 1000 or 0
end
if not has_head then
  return { 1, time[1], time[2], theirs, history }
end
if (charges == 1 and not head) or (head and next_expiry ~= read('>I8', head, 10)) or (not head and next_expiry > 0) then
  if not head then
    history = ARGV[2]
  end
  call('SET', KEYS[head_at], '\1' .. history .. write('>I8', next_expiry))
end
return { 1, time[1], time[2], theirs, history }
