//! `?waitMs=` of a check: how long it may wait until it fits.

use std::time::Duration;

use super::ApiError;

/// The longest that a check waits, in milliseconds: shorter than most clients and proxies wait for an answer.
pub const MAX_WAIT_MS: u64 = 60_000;

/// Parses the parameter `waitMs`: how long the check may wait; `None` for 0.
///
/// # Errors
/// 400 unless it is a whole number of at most [`MAX_WAIT_MS`].
pub fn wait_time(wait_ms: &str) -> Result<Option<Duration>, ApiError> {
    let millis = wait_ms.parse().ok().filter(|millis| *millis <= MAX_WAIT_MS);
    let message = || format!("waitMs must be a whole number from 0 to {MAX_WAIT_MS}");
    let millis = millis.ok_or_else(|| ApiError::bad("waitMs", message()))?;
    Ok((millis > 0).then(|| Duration::from_millis(millis)))
}

/// Parses the parameter `waitMs` for a host without queues of waiting requests, which accepts only 0.
///
/// # Errors
/// As for [`wait_time`], and 400 for a time above 0: a host that ignored it would deny requests that are sent to wait.
pub fn refuse_waiting(wait_ms: &str) -> Result<(), ApiError> {
    match wait_time(wait_ms)? {
        None => Ok(()),
        Some(_) => Err(ApiError::not_served("waitMs", "waiting")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_cannot_wait_says_so() {
        assert_eq!(wait_time("250"), Ok(Some(Duration::from_millis(250))));
        assert_eq!(wait_time("0"), Ok(None));
        assert_eq!(refuse_waiting("0"), Ok(()));
        let refused = |text| refuse_waiting(text).unwrap_err().to_json();
        let waiting = "waiting is served by `threshold serve` only: leave out waitMs";
        assert_eq!(
            refused("250"),
            format!("{{\"error\":\"bad_request\",\"message\":\"{waiting}\",\"field\":\"waitMs\"}}")
        );
        for wrong in ["", "-1", "1.5", "60001"] {
            assert!(refused(wrong).contains("waitMs must be a whole number from 0 to 60000"), "{wrong}");
        }
    }
}
