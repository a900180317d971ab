//! Numbers with units, and the notations of ranges and counts: `1.5us`, `100gbit`, `4MiB`, `>= 2`, `+1..+5`.

#[cfg(feature = "schema")]
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserialize, Deserializer, Visitor};
use softhca_fabric::{InclusiveRange, PER_BILLION};
#[cfg(feature = "schema")]
use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

/// A value that files write as a string, or as a bare number where that is unambiguous.
trait Notation: Sized {
    /// Description for messages.
    const DESCRIPTION: &'static str;
    /// Examples for messages and the schema.
    const EXAMPLES: &'static [&'static str];

    /// The value of a string.
    fn from_text(text: &str) -> Result<Self, String>;

    /// The value of an integer without a unit, if that is allowed.
    fn from_integer(number: i64) -> Option<Self> {
        let _ = number;
        None
    }

    /// The value of a fraction without a unit, if that is allowed.
    fn from_float(number: f64) -> Option<Self> {
        let _ = number;
        None
    }
}

struct NotationVisitor<T>(PhantomData<T>);

impl<T: Notation> Visitor<'_> for NotationVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} such as {}", T::DESCRIPTION, T::EXAMPLES.join(", "))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        T::from_text(text).map_err(|why| {
            E::custom(format!(
                "{text:?} is not {}: {why}; examples: {}",
                T::DESCRIPTION,
                T::EXAMPLES.join(", ")
            ))
        })
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        T::from_integer(number).ok_or_else(|| not_allowed::<T, E>(number))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        self.visit_i64(number.try_into().unwrap_or(i64::MAX))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<T, E> {
        T::from_float(number).ok_or_else(|| not_allowed::<T, E>(number))
    }
}

/// The error for a number without a unit where one is necessary.
fn not_allowed<T: Notation, E: de::Error>(number: impl fmt::Display) -> E {
    E::custom(format!("{number} is not {}; examples: {}", T::DESCRIPTION, T::EXAMPLES.join(", ")))
}

macro_rules! notation {
    ($name:ident, [$($kind:literal),*]) => {
        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<$name, String> {
                $name::from_text(text)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$name, D::Error> {
                deserializer.deserialize_any(NotationVisitor(PhantomData))
            }
        }

        #[cfg(feature = "schema")]
        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                let kinds: &[&str] = &[$($kind),*];
                json_schema!({
                    "type": kinds,
                    "description": $name::DESCRIPTION,
                    "examples": $name::EXAMPLES,
                })
            }
        }
    };
}

/// Converts a decimal number with a unit to an integer of the smallest unit, without rounding.
fn parse_with_unit(text: &str, units: &[(&str, u64)]) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(text.len());
    let (number, unit) = (text[..split].replace('_', ""), text[split..].trim());
    let known = || units.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let Some((_, factor)) = units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)) else {
        return Err(match unit {
            "" => format!("missing unit (one of {})", known()),
            _ => format!("unknown unit {unit:?}, use one of {}", known()),
        });
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((&number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return Err("missing number".into());
    }
    if fraction.contains('.') {
        return Err("more than one decimal point".into());
    }
    let too_large = || "the number is too large".to_owned();
    let mut value = match whole {
        "" => 0,
        whole => whole.parse::<u64>().map_err(|_| too_large())?.checked_mul(*factor).ok_or_else(too_large)?,
    };
    let mut place = *factor;
    for digit in fraction.bytes() {
        if !place.is_multiple_of(10) && digit != b'0' {
            return Err("more precise than the smallest unit".into());
        }
        place /= 10;
        value = value.checked_add(u64::from(digit - b'0') * place).ok_or_else(too_large)?;
    }
    Ok(value)
}

/// Parses a time with its unit.
pub fn parse_nanoseconds(text: &str) -> Result<u64, String> {
    let units = [
        ("ns", 1),
        ("us", 1_000),
        ("µs", 1_000),
        ("ms", 1_000_000),
        ("s", 1_000_000_000),
        ("min", 60_000_000_000),
    ];
    parse_with_unit(text, &units)
}

/// A time in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Time(pub u64);

impl Time {
    /// The maximum, one day. Sums of many such times do not overflow.
    pub const MAX: Time = Time(86_400_000_000_000);
}

impl Notation for Time {
    const DESCRIPTION: &'static str = "a time with its unit";
    const EXAMPLES: &'static [&'static str] = &["\"500ns\"", "\"1.5us\"", "\"10ms\"", "\"2s\""];

    fn from_text(text: &str) -> Result<Time, String> {
        match parse_nanoseconds(text)? {
            ns if ns > Time::MAX.0 => Err("a run lasts at most one day".into()),
            ns => Ok(Time(ns)),
        }
    }

    fn from_integer(number: i64) -> Option<Time> {
        (number == 0).then_some(Time(0))
    }
}

notation!(Time, ["string", "integer"]);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&softhca_trace::duration(self.0))
    }
}

/// Bits per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(pub u64);

impl Notation for Rate {
    const DESCRIPTION: &'static str = "a rate in bits per second with its unit";
    const EXAMPLES: &'static [&'static str] = &["\"100gbit\"", "\"2.5gbit\"", "\"40mbit\""];

    fn from_text(text: &str) -> Result<Rate, String> {
        let units = [
            ("bit", 1),
            ("kbit", 1_000),
            ("mbit", 1_000_000),
            ("gbit", 1_000_000_000),
            ("tbit", 1_000_000_000_000),
            ("b/s", 1),
            ("kb/s", 1_000),
            ("mb/s", 1_000_000),
            ("gb/s", 1_000_000_000),
        ];
        parse_with_unit(text, &units).map(Rate)
    }

    fn from_integer(number: i64) -> Option<Rate> {
        (number == 0).then_some(Rate(0))
    }
}

notation!(Rate, ["string", "integer"]);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            0..1_000 => return write!(f, "{} bit/s", self.0),
            1_000..1_000_000 => (1_000, "kbit/s"),
            1_000_000..1_000_000_000 => (1_000_000, "Mbit/s"),
            _ => (1_000_000_000, "Gbit/s"),
        };
        let hundredths = self.0 / (unit / 100);
        write!(f, "{}.{:02} {name}", hundredths / 100, hundredths % 100)
    }
}

/// A size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Size(pub u64);

impl Notation for Size {
    const DESCRIPTION: &'static str = "a number of bytes";
    const EXAMPLES: &'static [&'static str] = &["4000", "\"64KiB\"", "\"4MB\""];

    fn from_text(text: &str) -> Result<Size, String> {
        let units = [
            ("", 1),
            ("B", 1),
            ("KB", 1_000),
            ("MB", 1_000_000),
            ("GB", 1_000_000_000),
            ("KiB", 1 << 10),
            ("MiB", 1 << 20),
            ("GiB", 1 << 30),
        ];
        parse_with_unit(text, &units).map(Size)
    }

    fn from_integer(number: i64) -> Option<Size> {
        number.try_into().ok().map(Size)
    }
}

notation!(Size, ["string", "integer"]);

/// A probability in parts per billion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Probability(pub u32);

impl Probability {
    fn from_fraction(fraction: f64) -> Option<Probability> {
        // Rounded to the nearest billionth. IEEE 754 makes the result the same on every machine.
        (0.0..=1.0)
            .contains(&fraction)
            .then(|| Probability((fraction * f64::from(PER_BILLION)).round() as u32))
    }
}

impl Notation for Probability {
    const DESCRIPTION: &'static str = "a probability";
    const EXAMPLES: &'static [&'static str] = &["0.01", "\"1%\"", "\"1/256\""];

    fn from_text(text: &str) -> Result<Probability, String> {
        let out_of_range = || "not between 0 and 1".to_owned();
        if let Some((part, whole)) = text.split_once('/') {
            let number =
                |text: &str| text.trim().parse::<u64>().map_err(|_| format!("{text:?} is not an integer"));
            let (part, whole) = (number(part)?, number(whole)?);
            if whole == 0 || part > whole {
                return Err(out_of_range());
            }
            return Ok(Probability((u128::from(part) * u128::from(PER_BILLION) / u128::from(whole)) as u32));
        }
        let (text, divisor) = text.strip_suffix('%').map_or((text, 1.0), |text| (text, 100.0));
        let number: f64 = text.trim().parse().map_err(|_| "not a number".to_owned())?;
        Probability::from_fraction(number / divisor).ok_or_else(out_of_range)
    }

    fn from_integer(number: i64) -> Option<Probability> {
        Probability::from_fraction(number as f64)
    }

    fn from_float(number: f64) -> Option<Probability> {
        Probability::from_fraction(number)
    }
}

notation!(Probability, ["string", "number"]);

/// An expected count: exact, with a bound, or a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountRange {
    pub min: u64,
    pub max: u64,
}

impl CountRange {
    /// One or more.
    pub const AT_LEAST_ONE: CountRange = CountRange { min: 1, max: u64::MAX };

    /// An exact count.
    pub const fn exactly(number: u64) -> CountRange {
        CountRange { min: number, max: number }
    }

    /// Whether the range contains `number`.
    pub const fn contains(self, number: u64) -> bool {
        self.min <= number && number <= self.max
    }
}

impl Notation for CountRange {
    const DESCRIPTION: &'static str = "a count";
    const EXAMPLES: &'static [&'static str] = &["1", "\">= 2\"", "\"< 10\"", "\"3..5\""];

    fn from_text(text: &str) -> Result<CountRange, String> {
        let number = |text: &str| {
            let digits = text.trim().replace('_', "");
            digits.parse::<u64>().map_err(|_| format!("{:?} is not an integer", text.trim()))
        };
        let text = text.trim();
        let amount = if let Some(rest) = text.strip_prefix(">=") {
            CountRange { min: number(rest)?, max: u64::MAX }
        } else if let Some(rest) = text.strip_prefix("<=") {
            CountRange { min: 0, max: number(rest)? }
        } else if let Some(rest) = text.strip_prefix('>') {
            CountRange { min: number(rest)?.saturating_add(1), max: u64::MAX }
        } else if let Some(rest) = text.strip_prefix('<') {
            let most = number(rest)?.checked_sub(1).ok_or("no count is below 0")?;
            CountRange { min: 0, max: most }
        } else if let Some((first, last)) = text.split_once("..") {
            CountRange { min: number(first)?, max: number(last)? }
        } else {
            CountRange::exactly(number(text)?)
        };
        match amount.min <= amount.max {
            true => Ok(amount),
            false => Err("the range is empty".into()),
        }
    }

    fn from_integer(number: i64) -> Option<CountRange> {
        number.try_into().ok().map(CountRange::exactly)
    }
}

notation!(CountRange, ["string", "integer"]);

impl fmt::Display for CountRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.min, self.max) {
            (least, most) if least == most => write!(f, "{least}"),
            (least, u64::MAX) => write!(f, "at least {least}"),
            (0, most) => write!(f, "at most {most}"),
            (least, most) => write!(f, "{least} to {most}"),
        }
    }
}

/// A range of integers: `3`, `"1..5"` (both included), `"2.."`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntegerRange(pub InclusiveRange);

impl Notation for IntegerRange {
    const DESCRIPTION: &'static str = "an integer or a range of integers";
    const EXAMPLES: &'static [&'static str] = &["3", "\"1..5\"", "\"2..\""];

    fn from_text(text: &str) -> Result<IntegerRange, String> {
        parse_range(text, |text| text.parse().map_err(|_| format!("{text:?} is not an integer")))
            .map(IntegerRange)
    }

    fn from_integer(number: i64) -> Option<IntegerRange> {
        number.try_into().ok().map(|number| IntegerRange(InclusiveRange::exactly(number)))
    }
}

notation!(IntegerRange, ["string", "integer"]);

/// A time window: `"10us..20us"`, `"1ms.."`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeWindow(pub InclusiveRange);

impl Notation for TimeWindow {
    const DESCRIPTION: &'static str = "a time window";
    const EXAMPLES: &'static [&'static str] = &["\"10us..20us\"", "\"1ms..\"", "\"0..5us\""];

    fn from_text(text: &str) -> Result<TimeWindow, String> {
        if !text.contains("..") {
            return Err("write start and end with .. between them".into());
        }
        parse_range(text, |text| match text {
            "0" => Ok(0),
            text => Ok(text.parse::<Time>()?.0),
        })
        .map(TimeWindow)
    }
}

notation!(TimeWindow, ["string"]);

/// A range of PSNs: relative to the first of the queue pair with a plus sign, absolute without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PsnRange {
    /// Relative to the first request of the queue pair: `"+1"`, `"+1..+5"`, `"+3.."`.
    Relative(InclusiveRange),
    /// As in the BTH: `"0x00abcd"`, `77`.
    Absolute(InclusiveRange),
}

impl Notation for PsnRange {
    const DESCRIPTION: &'static str = "a PSN or a range of PSNs";
    const EXAMPLES: &'static [&'static str] = &["\"+1\"", "\"+1..+5\"", "\"+3..\"", "\"0xabcdef\""];

    fn from_text(text: &str) -> Result<PsnRange, String> {
        let relative = text.trim().starts_with('+');
        let parsed = parse_range(text, |text| {
            let digits = match (relative, text.strip_prefix('+')) {
                (true, Some(digits)) => digits,
                (false, None) => text,
                _ => return Err("write a plus sign at both ends or at none".into()),
            };
            let number = match digits.strip_prefix("0x") {
                Some(digits) => u64::from_str_radix(digits, 16),
                None => digits.parse(),
            };
            number.map_err(|_| format!("{text:?} is not a PSN"))
        })?;
        if !relative && parsed.first >= 1 << 24 {
            return Err("a PSN has 24 bits".into());
        }
        Ok(if relative { PsnRange::Relative(parsed) } else { PsnRange::Absolute(parsed) })
    }

    fn from_integer(number: i64) -> Option<PsnRange> {
        (0..1 << 24).contains(&number).then(|| PsnRange::Absolute(InclusiveRange::exactly(number as u64)))
    }
}

notation!(PsnRange, ["string", "integer"]);

fn parse_range(text: &str, number: impl Fn(&str) -> Result<u64, String>) -> Result<InclusiveRange, String> {
    let text = text.trim();
    let span = match text.split_once("..") {
        None => InclusiveRange::exactly(number(text)?),
        Some((first, "")) => InclusiveRange::at_least(number(first.trim())?),
        Some((first, last)) => InclusiveRange { first: number(first.trim())?, last: number(last.trim())? },
    };
    if span.first > span.last { Err("the range is empty".into()) } else { Ok(span) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_with_units_are_converted_without_rounding() {
        assert_eq!("1.5us".parse(), Ok(Time(1_500)));
        assert_eq!("0.001us".parse(), Ok(Time(1)));
        assert_eq!("838.84us".parse(), Ok(Time(838_840)));
        assert_eq!("100gbit".parse(), Ok(Rate(100_000_000_000)));
        assert_eq!("2.5 Gb/s".parse(), Ok(Rate(2_500_000_000)));
        assert_eq!("4MB".parse(), Ok(Size(4_000_000)));
        assert_eq!("4MiB".parse(), Ok(Size(4 << 20)));
        assert_eq!("1/256".parse(), Ok(Probability(3_906_250)));
        assert_eq!("1%".parse(), Ok(Probability(10_000_000)));
    }

    #[test]
    fn invalid_quantities_are_rejected_with_a_reason() {
        let time = |text: &str| text.parse::<Time>().unwrap_err();
        assert_eq!(time("5"), "missing unit (one of ns, us, µs, ms, s, min)");
        assert_eq!(time("5 parsecs"), "unknown unit \"parsecs\", use one of ns, us, µs, ms, s, min");
        assert_eq!(time("0.5ns"), "more precise than the smallest unit");
        assert_eq!(time("us"), "missing number");
        assert_eq!(time("1.2.3us"), "more than one decimal point");
        assert!(time("99999999999999999999s").contains("too large"));
        assert_eq!("5..3".parse::<IntegerRange>().unwrap_err(), "the range is empty");
        assert_eq!("+5..7".parse::<PsnRange>().unwrap_err(), "write a plus sign at both ends or at none");
        assert_eq!("3/2".parse::<Probability>().unwrap_err(), "not between 0 and 1");
    }

    #[test]
    fn count_ranges_contain_their_bounds() {
        let holds = |text: &str, number| text.parse::<CountRange>().unwrap().contains(number);
        assert!(holds(">= 2", 2) && !holds(">= 2", 1));
        assert!(holds("< 2", 1) && !holds("< 2", 2));
        assert!(holds("3..5", 5) && !holds("3..5", 6));
        assert!(holds("0", 0) && !holds("0", 1));
    }
}
