//! Times on the command line: `10us`, `1.5ms`, `2s`, or plain seconds.

use std::str::FromStr;

/// A time since the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time(i64);

impl Time {
    /// The time in nanoseconds.
    pub const fn nanoseconds(self) -> i64 {
        self.0
    }
}

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Time, String> {
        const UNITS: [(&str, u64); 5] = [
            ("ns", 1),
            ("us", 1_000),
            ("µs", 1_000),
            ("ms", 1_000_000),
            // Last, because every other unit ends in `s` too.
            ("s", 1_000_000_000),
        ];
        let found = UNITS.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)));
        let (number, unit) = found.unwrap_or((text, 1_000_000_000));
        let wrong = || format!("`{text}` is not a time; examples: 10us, 1.5ms, 2s");
        let (whole, fraction) = number.trim_end().split_once('.').unwrap_or((number.trim_end(), "0"));
        let digits = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(whole) || !digits(fraction) {
            return Err(wrong());
        }
        let whole: u64 = whole.parse().map_err(|_| wrong())?;
        let whole = whole.checked_mul(unit).ok_or_else(wrong)?;
        // The resolution is a nanosecond.
        let fraction = &fraction[..fraction.len().min(9)];
        let scale = 10u64.pow(fraction.len() as u32);
        let part = u128::from(fraction.parse::<u64>().map_err(|_| wrong())?) * u128::from(unit);
        let nanoseconds = whole.checked_add((part / u128::from(scale)) as u64).ok_or_else(wrong)?;
        i64::try_from(nanoseconds).map(Time).map_err(|_| wrong())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units_or_are_seconds() {
        for (text, nanoseconds) in [
            ("0", 0),
            ("2", 2_000_000_000),
            ("0.000001", 1_000),
            ("7ns", 7),
            ("10us", 10_000),
            ("10 µs", 10_000),
            ("1.5ms", 1_500_000),
            ("2s", 2_000_000_000),
        ] {
            assert_eq!(text.parse(), Ok(Time(nanoseconds)), "{text}");
        }
        for text in ["", "us", "-1s", "1.", ".5", "1e3", "1 minute", "99999999999999s"] {
            assert!(text.parse::<Time>().is_err(), "{text}");
        }
    }
}
