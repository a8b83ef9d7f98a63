//! Values of `RGPU_…` environment variables. One that makes no sense is named on stderr, once.

use std::ops::RangeInclusive;
use std::sync::Mutex;

/// A variable's value, without the spaces around it. An empty one counts as not set.
pub(crate) fn text(name: &str) -> Option<String> {
    let value = std::env::var_os(name)?;
    let value = value.to_string_lossy().trim().to_owned();
    (!value.is_empty()).then_some(value)
}

/// Says that a value was not what was expected, and what happens instead.
pub(crate) fn complain(name: &'static str, text: &str, expected: &str, used: Option<u64>) {
    static SAID: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    let mut said = SAID.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if said.contains(&name) {
        return;
    }
    said.push(name);
    drop(said);
    match used {
        Some(used) => super::warn(format_args!("{name}={text} is not {expected}: {used} is used")),
        None => super::warn(format_args!("{name}={text} is not {expected}: it is ignored")),
    }
}

/// A variable's value as a number. `unit`: what it counts. A number outside the range counts as the nearest
/// one inside.
pub fn number(name: &'static str, unit: &str, range: RangeInclusive<u64>) -> Option<u64> {
    let text = text(name)?;
    let (used, is_right) = read(&text, &range);
    if !is_right {
        let expected = format!("a number of {unit} from {} to {}", range.start(), range.end());
        complain(name, &text, &expected, used);
    }
    used
}

/// The number that a text stands for, and whether it is a number in the range.
fn read(text: &str, range: &RangeInclusive<u64>) -> (Option<u64>, bool) {
    let number = text.parse::<u64>().ok();
    let used = number.map(|number| number.clamp(*range.start(), *range.end()));
    (used, number.is_some() && used == number)
}

/// A variable's value as one of these words.
pub fn word(name: &'static str, words: &[&'static str]) -> Option<&'static str> {
    let text = text(name)?;
    let known = find(&text, words);
    if known.is_none() {
        complain(name, &text, &one_of(words), None);
    }
    known
}

/// The word that a text is, in whatever case.
pub(crate) fn find(text: &str, words: &[&'static str]) -> Option<&'static str> {
    words.iter().copied().find(|word| word.eq_ignore_ascii_case(text))
}

/// These words as what is expected.
pub(crate) fn one_of(words: &[&str]) -> String {
    match words {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        words => words.join(""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_outside_its_range_counts_as_the_nearest() {
        let seconds = 1..=86_400;
        for (text, expected) in [
            ("10", (Some(10), true)),
            ("0", (Some(1), false)),
            ("100000", (Some(86_400), false)),
            ("10m", (None, false)),
            ("-1", (None, false)),
        ] {
            assert_eq!(read(text, &seconds), expected, "{text}");
        }
    }

    #[test]
    fn words_are_known_in_every_case() {
        let words = ["userfaultfd", "signal"];
        assert_eq!(find("Signal", &words), Some("signal"));
        assert_eq!(find("uffd", &words), None);
        assert_eq!(one_of(&words), "userfaultfd or signal");
        assert_eq!(one_of(&["off", "error", "warn"]), "off, error or warn");
    }
}
