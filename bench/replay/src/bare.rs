//! The bare parse: lines cut into the fields that a rehearsal needs, address and time made numbers, nothing decided.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::net::IpAddr;
use std::path::Path;

use anyhow::Context as _;

/// Something of every field, so that nothing can be left out.
#[derive(Default)]
pub(crate) struct Read {
    pub(crate) requests: u64,
    sum: u64,
}

pub(crate) fn parse(path: &Path) -> anyhow::Result<Read> {
    let mut reader = BufReader::with_capacity(128 << 10, File::open(path)?);
    let mut line = Vec::new();
    let mut read = Read::default();
    loop {
        line.clear();
        if reader.read_until(b'\n', &mut line)? == 0 {
            break;
        }
        let text = std::str::from_utf8(&line)?;
        read.sum = read.sum.wrapping_add(one(text).context("a line cannot be read")?);
        read.requests += 1;
    }
    std::hint::black_box(read.sum);
    Ok(read)
}

fn one(line: &str) -> Option<u64> {
    let (who, rest) = line.split_once(" [")?;
    let (time, rest) = rest.split_once(']')?;
    let mut who = who.splitn(3, ' ');
    let ip: IpAddr = who.next()?.parse().ok()?;
    let (ident, user) = (who.next()?, who.next()?);
    let rest = rest.strip_prefix(" \"")?;
    let end = memchr::memchr(b'"', rest.as_bytes())?;
    let (request, rest) = rest.split_at_checked(end)?;
    let (method, request) = request.split_once(' ')?;
    let (path, _) = request.rsplit_once(' ')?;
    let status: u64 = rest.get(2..5)?.parse().ok()?;
    let clock = time.get(12..20)?;
    let mut seconds = 0;
    for part in clock.split(':') {
        seconds = seconds * 60 + part.parse::<u64>().ok()?;
    }
    let lengths = ident.len() + user.len() + method.len() + path.len();
    Some(seconds + status + u64::try_from(lengths).ok()? + u64::from(ip.is_ipv4()))
}
