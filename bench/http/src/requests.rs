//! What each contender is asked, for each key: the same caller, in its own words.

use std::io::Write as _;
use std::net::Ipv4Addr;

/// How many users a tenant has.
const USERS_PER_TENANT: u32 = 1_000;
/// So many at once that no run gets there.
pub const FAR: u32 = 250_000_000;

/// A policy of four layers, each far from its limit.
pub fn policy(keys: u32) -> String {
    let rule = |name: &str, per: &str, more: &str| {
        format!(
            "[[rule]]\nname = '{name}'\nlayer = '{name}'\nper = ['{per}']\nlimit = '1/20s burst {FAR}'\n\
             algorithm = 'token-bucket'\n{more}\n"
        )
    };
    let identity = "[identity]\ntrusted_proxies = ['127.0.0.1/32']\nclient_ip = 'x-forwarded-for'\n\
                    tenant = 'header:x-tenant'\nuser = 'header:x-user'\n";
    let endpoint = "match = { method = 'POST', path = '/api/posts' }";
    let rules = [
        rule("edge", "ip", ""),
        rule("tenant", "tenant", ""),
        rule("user", "user", ""),
        rule("endpoint", "user", endpoint),
    ];
    format!("{identity}{}[memory]\nmax_keys = {}\n", rules.concat(), u64::from(keys) * 4)
}

/// Who is asking: an address, a tenant and a user of its own for each key.
struct Caller {
    ip: Ipv4Addr,
    tenant: u32,
    user: u64,
}

impl Caller {
    fn of(key: u32) -> Self {
        // Below 10.0.0.0/8 there is room for every key.
        Self { ip: Ipv4Addr::from_bits(0x0a00_0000 | key), tenant: key / USERS_PER_TENANT, user: mix(u64::from(key)) }
    }
}

/// `POST /v1/check`, which the floor is asked as well.
pub fn check(out: &mut Vec<u8>, key: u32) {
    let Caller { ip, tenant, user } = Caller::of(key);
    let body = format!(
        "{{\"ip\":\"{ip}\",\"tenant\":\"tenant-{tenant:06}\",\"user\":\"user:{user:016x}-eu\",\"method\":\"POST\",\
         \"path\":\"/api/posts\"}}"
    );
    post(out, "/v1/check", &body);
}

/// `GET /auth`, as a proxy asks it; the floor is asked the same.
pub fn threshold_get(out: &mut Vec<u8>, key: u32) {
    let Caller { ip, tenant, user } = Caller::of(key);
    let _ = write!(
        out,
        "GET /auth HTTP/1.1\r\nhost: 127.0.0.1\r\nx-forwarded-for: {ip}\r\nx-forwarded-method: POST\r\n\
         x-forwarded-uri: /api/posts\r\nx-forwarded-host: api.example.com\r\nx-tenant: tenant-{tenant:06}\r\n\
         x-user: user:{user:016x}-eu\r\n\r\n"
    );
}

/// One limit by key, with the limit in the request.
pub fn throttlecrab(out: &mut Vec<u8>, key: u32) {
    let user = Caller::of(key).user;
    let body = format!(
        "{{\"key\":\"user:{user:016x}-eu\",\"max_burst\":{FAR},\"count_per_period\":3,\"period\":60,\"quantity\":1}}"
    );
    post(out, "/throttle", &body);
}

/// One limit by key, configured in the server.
pub fn limitador(out: &mut Vec<u8>, key: u32) {
    let user = Caller::of(key).user;
    let body = format!("{{\"namespace\":\"bench\",\"values\":{{\"user\":\"user:{user:016x}-eu\"}},\"delta\":1}}");
    post(out, "/check_and_report", &body);
}

/// One limit by a header field.
pub fn by_header(out: &mut Vec<u8>, key: u32) {
    let user = Caller::of(key).user;
    let _ = write!(out, "GET /api/posts HTTP/1.1\r\nhost: 127.0.0.1\r\nx-user: user:{user:016x}-eu\r\n\r\n");
}

fn post(out: &mut Vec<u8>, path: &str, body: &str) {
    let _ = write!(
        out,
        "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
}

/// SplitMix64's finalizer: every input bit changes half of the output's.
pub fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
