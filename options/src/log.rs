//! What a daemon logs.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Parses what to log: levels and filters as in `RUST_LOG`, separated by commas, and returns them without
/// blanks. In `RUST_LOG`, a word that is no level is a part of a program, of which everything is logged, and
/// of all others nothing. Here it is an error, as it is most likely a misspelled level.
pub fn parse_filter(text: &str) -> Result<String, String> {
    const LEVELS: &str = "off, error, warn, info, debug or trace";
    let directives: Vec<&str> = text.split(',').map(str::trim).collect();
    for directive in &directives {
        let is_word = !directive.contains(['=', '[', ':']);
        if is_word && directive.parse::<LevelFilter>().is_err() {
            return Err(format!(
                "{directive:?} is not a level, which is {LEVELS}; a filter for a part of a daemon is PART=LEVEL"
            ));
        }
        EnvFilter::try_new(directive).map_err(|e| format!("{directive:?} is not a filter: {e}"))?;
    }
    Ok(directives.join(","))
}
