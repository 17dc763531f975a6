//! The ticks of an axis: round figures, and round times of the day.

use super::super::zone::Zone;

/// The most ticks on an axis of time.
const TIME_TICKS: u64 = 8;
const DAY: u64 = 86_400;
const WEEK: u64 = 604_800;
/// The Unix epoch was a Thursday: the first Monday came this many seconds later.
const FIRST_MONDAY: u64 = 345_600;
/// The steps between ticks, in seconds.
const STEPS: [u64; 25] = [
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1_800,
    3_600,
    7_200,
    10_800,
    21_600,
    43_200,
    DAY,
    2 * DAY,
    WEEK,
    2 * WEEK,
    4 * WEEK,
    12 * WEEK,
    52 * WEEK,
    520 * WEEK,
];

/// Returns round figures from 0 to at most `most`, about four of them.
pub(super) fn ticks(most: u64) -> Vec<u64> {
    let mut step: u64 = 1;
    // The steps are 1, 2, 5, 10, 20, 50 and so on.
    for factor in [2, 5, 10].into_iter().cycle() {
        if most.checked_div(step).unwrap_or(0) <= 4 {
            break;
        }
        let power = 10_u64.checked_pow(step.checked_ilog10().unwrap_or(0)).unwrap_or(u64::MAX);
        step = power.saturating_mul(factor);
    }
    (0..=4).map(|index| step.saturating_mul(index)).take_while(|tick| *tick <= most).collect()
}

/// Returns 1, 10, 100 and so on, up to at most `most`.
pub(super) fn powers_of_ten(most: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(1_u64), |power| power.checked_mul(10)).take_while(move |power| *power <= most)
}

/// Returns round local times between two seconds since the epoch, with their labels.
pub(super) fn time_ticks(from: u64, until: u64, zone: &Zone) -> Vec<(u64, String)> {
    let fits = |step: &u64| until.saturating_sub(from).checked_div(*step).unwrap_or(0) <= TIME_TICKS;
    let step = STEPS.into_iter().find(fits).unwrap_or(520 * WEEK);
    // Ticks are round in local time. Where the clocks change within the log, those after it are off by the change, and their
    // labels say so.
    let offset = zone.offset(from.saturating_mul(1_000_000));
    // Weeks since the epoch would begin on Thursdays.
    let phase = if step.is_multiple_of(WEEK) { FIRST_MONDAY } else { 0 };
    let local = from.saturating_add_signed(offset).saturating_sub(phase);
    let first = local.div_ceil(step).saturating_mul(step).saturating_add(phase);
    let at = |index: u64| {
        let local = first.saturating_add(step.saturating_mul(index));
        local.saturating_add_signed(offset.saturating_neg())
    };
    let ticks = (0..=TIME_TICKS).map(at).take_while(|tick| *tick <= until);
    ticks.map(|tick| (tick, label(tick, step, zone))).collect()
}

fn label(secs: u64, step: u64, zone: &Zone) -> String {
    let at = zone.civil(secs.saturating_mul(1_000_000));
    let is_midnight = at.hour() == 0 && at.minute() == 0 && at.second() == 0;
    if step >= 12 * WEEK {
        at.strftime("%b %Y").to_string()
    } else if step >= DAY || is_midnight {
        at.strftime("%-d %b").to_string()
    } else if step < 60 {
        at.strftime("%H:%M:%S").to_string()
    } else {
        at.strftime("%H:%M").to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        for (most, expect) in [
            (0, vec![0]),
            (1, vec![0, 1]),
            (3, vec![0, 1, 2, 3]),
            (7, vec![0, 2, 4, 6]),
            (10, vec![0, 5, 10]),
            (99, vec![0, 20, 40, 60, 80]),
            (240, vec![0, 50, 100, 150, 200]),
            (1_753, vec![0, 500, 1_000, 1_500]),
        ] {
            assert_eq!(ticks(most), expect, "{most}");
        }
        for most in (0..64).map(|shift| u64::MAX >> shift) {
            assert!((1..=5).contains(&ticks(most).len()), "{most}: {:?}", ticks(most));
        }
        assert_eq!(powers_of_ten(1_000).collect::<Vec<_>>(), [1, 10, 100, 1_000]);
    }

    #[test]
    fn ticks_of_time_are_round_in_the_zone() {
        // 2015-05-17 10:05:03 UTC.
        let from = 1_431_857_103;
        let labels = |span: u64, zone: &str| -> Vec<String> {
            let zone = Zone::parse(zone).unwrap();
            time_ticks(from, from + span, &zone).into_iter().map(|(_, label)| label).collect()
        };
        assert_eq!(labels(12, "UTC"), ["10:05:04", "10:05:06", "10:05:08", "10:05:10", "10:05:12", "10:05:14"]);
        assert_eq!(
            labels(4 * 3_600, "Asia/Kolkata"),
            ["16:00", "16:30", "17:00", "17:30", "18:00", "18:30", "19:00", "19:30"]
        );
        assert_eq!(labels(20 * 3_600, "UTC"), ["12:00", "15:00", "18:00", "21:00", "18 May", "03:00", "06:00"]);
        assert_eq!(labels(4 * DAY, "Europe/Berlin").first().unwrap(), "18 May");
        // Weeks begin on Monday.
        assert_eq!(labels(30 * DAY, "UTC"), ["18 May", "25 May", "1 Jun", "8 Jun", "15 Jun"]);
        assert!(labels(u64::MAX / 4_000_000, "UTC").len() <= 9);
    }
}
