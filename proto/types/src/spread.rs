//! Periods that are not quite the same each time.

use crate::Millis;

/// By so much a period is longer or shorter, in percent.
const SPREAD_PERCENT: u64 = 10;

/// Returns the length of one turn of something that many do on their own in about the same period:
/// within a tenth of it, and on average the period itself.
///
/// Thousands of hosts that lost a planner together find it again together. With equal periods they
/// would come in a crowd ever after; so they are apart within a few turns.
#[must_use]
pub fn spread(period: Millis, who: &str, turn: u64) -> Millis {
    // FNV-1a, then a finalizer: neighbouring turns are to be far apart.
    let mut dice =
        who.bytes().chain(turn.to_le_bytes()).fold(0xcbf2_9ce4_8422_2325, |dice, byte| {
            (dice ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
    dice ^= dice >> 33;
    dice = dice.wrapping_mul(0xff51_afd7_ed55_8ccd);
    dice ^= dice >> 33;
    let widest = period.value() / 100 * (2 * SPREAD_PERCENT);
    let least = period.value() - widest / 2;
    Millis(least + dice % (widest + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crowd_is_spread_over_the_period_within_a_minute() {
        let period = Millis(5_000);
        let mut at: Vec<u64> = (0..1_000)
            .map(|host| {
                let turns = (0..12).map(|turn| spread(period, &format!("h{host}"), turn).value());
                turns.sum::<u64>() % period.value()
            })
            .collect();
        at.sort_unstable();
        // Twenty equal parts of the period would have fifty each.
        let parts = (0..20_u64).map(|part| at.iter().filter(|at| **at / 250 == part).count());
        let fullest = parts.max().unwrap();
        assert!(fullest < 200, "{fullest} of 1000 in a twentieth of the period");
    }

    #[test]
    fn no_turn_is_further_off_than_a_tenth() {
        for turn in 0..10_000 {
            let length = spread(Millis(5_000), "a", turn).value();
            assert!((4_500..=5_500).contains(&length), "{length}");
        }
        assert_eq!(spread(Millis(0), "a", 1), Millis(0));
    }
}
