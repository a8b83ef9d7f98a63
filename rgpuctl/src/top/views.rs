//! The four views: their columns, and their rows, which are made from the last two samples and sorted as the
//! user has chosen.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::Value;

use super::sample::Sample;

/// A view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    Sessions,
    Programs,
    Gpus,
    Links,
}

impl View {
    /// All of them, in the order of their keys.
    pub const ALL: [View; 4] = [View::Sessions, View::Programs, View::Gpus, View::Links];

    /// Its name on the screen.
    pub fn name(self) -> &'static str {
        match self {
            View::Sessions => "Sessions",
            View::Programs => "Programs",
            View::Gpus => "GPUs",
            View::Links => "Links",
        }
    }

    /// Its columns.
    pub fn columns(self) -> &'static [Column] {
        const fn text(name: &'static str, width: u16) -> Column {
            Column { name, width, text: true }
        }
        const fn number(name: &'static str, width: u16) -> Column {
            Column { name, width, text: false }
        }
        match self {
            View::Sessions => {
                &const {
                    [
                        text("PRINCIPAL", 11),
                        text("CLIENT", 9),
                        text("PROGRAM", 13),
                        text("GPU", 3),
                        number("MEM", 5),
                        number("SM%", 4),
                        number("CMD/s", 5),
                        number("IN/s", 5),
                        number("OUT/s", 5),
                        number("TIME", 6),
                    ]
                }
            }
            View::Programs => {
                &const {
                    [
                        text("PROGRAM", 18),
                        number("SESSIONS", 8),
                        number("MEM", 5),
                        number("SM%", 4),
                        number("CMD/s", 5),
                        number("LAUNCH/s", 8),
                        number("TRIPS/s", 7),
                        number("IN/s", 5),
                        number("OUT/s", 5),
                    ]
                }
            }
            View::Gpus => {
                &const {
                    [
                        number("GPU", 3),
                        text("NAME", 14),
                        number("SESSIONS", 8),
                        number("UTIL%", 5),
                        number("HELD", 5),
                        number("AWAY", 5),
                        number("USED", 5),
                        number("FREE", 5),
                        number("°C", 3),
                        number("W", 4),
                        text("HEALTH", 8),
                    ]
                }
            }
            View::Links => {
                &const {
                    [
                        text("SERVES", 11),
                        text("PROGRAM", 11),
                        text("SERVER", 15),
                        text("VIA", 5),
                        number("RTT", 6),
                        number("CMD/s", 5),
                        number("SENT/s", 6),
                        number("RECV/s", 6),
                        text("STATE", 5),
                    ]
                }
            }
        }
    }

    /// The initial order of its rows: the busiest first.
    fn first_order(self) -> Sorting {
        let (column, descending) = match self {
            View::Sessions => (6, true),
            View::Programs => (4, true),
            View::Gpus => (0, false),
            View::Links => (5, true),
        };
        Sorting { column, descending }
    }
}

/// A column.
#[derive(Debug)]
pub struct Column {
    /// Its heading.
    pub name: &'static str,
    /// Its minimum width in characters.
    pub width: u16,
    /// Whether it has words, which are aligned left and share the remaining width.
    pub text: bool,
}

/// The content of a row and column.
#[derive(Debug, Clone, PartialEq)]
pub enum Cell {
    /// Words.
    Text(String),
    /// A number without unit.
    Number(f64),
    /// Bytes, or bytes per second.
    Bytes(f64),
    /// A long duration in seconds.
    Seconds(f64),
    /// A short duration in seconds.
    Short(f64),
    /// Unknown.
    Unknown,
}

impl Cell {
    /// The text for the screen.
    pub fn shown(&self) -> String {
        match self {
            Cell::Text(text) => text.clone(),
            Cell::Number(value) => scaled(*value, 1000.0, &["", "k", "M", "G", "T"]),
            Cell::Bytes(value) => scaled(*value, 1024.0, &["", "K", "M", "G", "T"]),
            Cell::Seconds(seconds) => {
                let seconds = *seconds as u64;
                match (seconds / 86400, seconds / 3600, seconds / 60) {
                    (0, 0, minutes) => format!("{minutes}:{:02}", seconds % 60),
                    (0, hours, _) => format!("{hours}h{:02}", seconds / 60 % 60),
                    (days, ..) => format!("{days}d{:02}", seconds / 3600 % 24),
                }
            }
            Cell::Short(seconds) if *seconds < 0.01 => format!("{:.0}µs", seconds * 1e6),
            Cell::Short(seconds) => format!("{:.0}ms", seconds * 1e3),
            Cell::Unknown => "-".into(),
        }
    }

    fn order(&self) -> (u8, f64, &str) {
        match self {
            Cell::Unknown => (0, 0.0, ""),
            Cell::Number(value) | Cell::Bytes(value) | Cell::Seconds(value) | Cell::Short(value) => {
                (1, *value, "")
            }
            Cell::Text(text) => (2, 0.0, text),
        }
    }

    fn compare(&self, other: &Cell) -> Ordering {
        let ((kind, number, text), (other_kind, other_number, other_text)) = (self.order(), other.order());
        kind.cmp(&other_kind).then(number.total_cmp(&other_number)).then(text.cmp(other_text))
    }
}

/// A number with at most four characters and a letter.
fn scaled(value: f64, step: f64, units: &[&str]) -> String {
    let mut value = value;
    for (place, unit) in units.iter().enumerate() {
        let last = place + 1 == units.len();
        if value < 999.5 || last {
            return match place {
                0 => format!("{value:.0}"),
                _ if value < 9.95 => format!("{value:.1}{unit}"),
                _ => format!("{value:.0}{unit}"),
            };
        }
        value /= step;
    }
    String::new()
}

/// A row of a view.
pub type Row = Vec<Cell>;

/// The order of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sorting {
    /// The column's index.
    pub column: usize,
    /// Whether the largest comes first.
    pub descending: bool,
}

/// What to do after a key.
#[derive(Debug, PartialEq, Eq)]
pub enum Order {
    /// Draw the screen again.
    Nothing,
    /// Read the daemons' status now.
    Look,
    /// End the program.
    Quit,
}

/// The state of the program.
pub struct App {
    last: Sample,
    before: Option<Sample>,
    pub view: View,
    sortings: [Sorting; View::ALL.len()],
    /// Number of rows above the visible ones.
    pub offset: usize,
    pub paused: bool,
    /// The rows of the view, in order.
    pub rows: Vec<Row>,
}

impl App {
    /// Starts with the first sample.
    pub fn new(first: Sample) -> App {
        let view = if first.daemons("rgpu-server").next().is_some() { View::Sessions } else { View::Links };
        let sortings = View::ALL.map(View::first_order);
        let mut app =
            App { last: first, before: None, view, sortings, offset: 0, paused: false, rows: Vec::new() };
        app.arrange();
        app
    }

    /// Takes another sample.
    pub fn take(&mut self, sample: Sample) {
        if !self.paused {
            self.before = Some(std::mem::replace(&mut self.last, sample));
            self.arrange();
        }
    }

    /// The order of the current view.
    pub fn sorting(&self) -> Sorting {
        self.sortings[self.view as usize]
    }

    /// Handles a key.
    pub fn key(&mut self, key: KeyEvent) -> Order {
        let columns = self.view.columns().len();
        let sorting = &mut self.sortings[self.view as usize];
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Order::Quit,
            KeyCode::Char('q') | KeyCode::Esc => return Order::Quit,
            KeyCode::Char(' ') => return Order::Look,
            KeyCode::Char('p') => self.paused = !self.paused,
            KeyCode::Char('r') => sorting.descending = !sorting.descending,
            KeyCode::Left => sorting.column = (sorting.column + columns - 1) % columns,
            KeyCode::Right => sorting.column = (sorting.column + 1) % columns,
            KeyCode::Tab => self.show(View::ALL[(self.view as usize + 1) % View::ALL.len()]),
            KeyCode::BackTab => {
                self.show(View::ALL[(self.view as usize + View::ALL.len() - 1) % View::ALL.len()])
            }
            KeyCode::Char(digit @ '1'..='4') => self.show(View::ALL[digit as usize - '1' as usize]),
            KeyCode::Up => self.offset = self.offset.saturating_sub(1),
            KeyCode::Down => self.offset += 1,
            KeyCode::PageUp => self.offset = self.offset.saturating_sub(10),
            KeyCode::PageDown => self.offset += 10,
            KeyCode::Home => self.offset = 0,
            KeyCode::End => self.offset = usize::MAX,
            _ => return Order::Nothing,
        }
        self.arrange();
        Order::Nothing
    }

    fn show(&mut self, view: View) {
        (self.view, self.offset) = (view, 0);
    }

    /// Makes the rows again.
    fn arrange(&mut self) {
        let rates = Rates::new(self.before.as_ref(), &self.last);
        self.rows = match self.view {
            View::Sessions => sessions(&self.last, &rates),
            View::Programs => programs(&self.last, &rates),
            View::Gpus => gpus(&self.last),
            View::Links => links(&self.last, &rates),
        };
        let Sorting { column, descending } = self.sorting();
        self.rows.sort_by(|a, b| {
            let order = a[column].compare(&b[column]);
            let order = if descending { order.reverse() } else { order };
            // Equal rows keep their order, even if the daemon lists them in another order.
            order.then_with(|| {
                a.iter().zip(b).map(|(a, b)| a.compare(b)).find(|o| o.is_ne()).unwrap_or(Ordering::Equal)
            })
        });
        self.offset = self.offset.min(self.rows.len().saturating_sub(1));
    }

    /// Lines about the daemons: one for each, and one for each socket that does not answer.
    pub fn summary(&self) -> Vec<String> {
        let count = |status: &Value, name: &str| status[name].as_array().map_or(0, Vec::len);
        let mut lines = Vec::new();
        for (_, status) in self.last.daemons("rgpu-server") {
            let mut line = format!(
                "rgpu-server {}: {} sessions of {}, {} waiting, {} workers ready, {} lost",
                clean(&status["version"]),
                count(status, "sessions"),
                status["max_sessions"],
                status["sessions_waiting"],
                status["workers_ready"],
                status["sessions_lost"],
            );
            if let Some(seconds) = status["drain_seconds_left"].as_u64() {
                line += &format!(", drains for {seconds} s");
            }
            lines.push(line);
        }
        for (_, status) in self.last.daemons("vhost-rgpu") {
            lines.push(format!(
                "vhost-rgpu {}: {} sessions, {} device processes, {} lost, {} refused",
                clean(&status["version"]),
                count(status, "sessions"),
                count(status, "device_processes"),
                status["sessions_lost"],
                status["sessions_refused"],
            ));
        }
        lines.extend(self.last.failures().into_iter().map(str::to_owned));
        lines
    }
}

/// Increase of each session's counters per second, by the session's daemon and number.
struct Rates<'a> {
    seconds: f64,
    before: HashMap<(String, u64, u64), &'a Value>,
}

/// The key of a session among those of its daemon: the worker, or the device process and a number.
fn identity(session: &Value) -> (u64, u64) {
    let number = |name: &str| session[name].as_u64().unwrap_or(0);
    (number("worker") + number("process"), number("id"))
}

impl<'a> Rates<'a> {
    fn new(before: Option<&'a Sample>, last: &Sample) -> Rates<'a> {
        let seconds = before.map_or(0.0, |before| last.at.saturating_duration_since(before.at).as_secs_f64());
        let all = before.into_iter().flat_map(|sample| {
            ["rgpu-server", "vhost-rgpu"].into_iter().flat_map(move |name| sample.daemons(name))
        });
        let mut by_session = HashMap::new();
        for (socket, status) in all {
            for session in status["sessions"].as_array().into_iter().flatten() {
                let (process, id) = identity(session);
                by_session.insert((socket.display().to_string(), process, id), session);
            }
        }
        Rates { seconds, before: by_session }
    }

    /// Increase of a session's counter per second, if it is known.
    fn of(&self, socket: &str, session: &Value, counter: &str) -> Option<f64> {
        let (process, id) = identity(session);
        let before = self.before.get(&(socket.to_owned(), process, id))?[counter].as_u64()?;
        let risen = session[counter].as_u64()?.checked_sub(before)?;
        (self.seconds > 0.0).then(|| risen as f64 / self.seconds)
    }
}

/// Text of a daemon or a client, without control characters.
fn clean(value: &Value) -> String {
    let text = value.as_str().unwrap_or("?");
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn text(value: &Value) -> Cell {
    if value.is_null() { Cell::Unknown } else { Cell::Text(clean(value)) }
}

fn number(value: Option<f64>) -> Cell {
    value.map_or(Cell::Unknown, Cell::Number)
}

fn bytes(value: Option<f64>) -> Cell {
    value.map_or(Cell::Unknown, Cell::Bytes)
}

/// Each session of each daemon with this name, with the daemon's socket.
fn each<'a>(sample: &'a Sample, name: &'a str, list: &'a str) -> impl Iterator<Item = (String, &'a Value)> {
    sample.daemons(name).flat_map(move |(socket, status)| {
        let rows = status[list].as_array().into_iter().flatten();
        rows.map(move |row| (socket.display().to_string(), row))
    })
}

fn sessions(sample: &Sample, rates: &Rates<'_>) -> Vec<Row> {
    let row = |(socket, session): (String, &Value)| {
        let rate = |counter| rates.of(&socket, session, counter);
        vec![
            text(&session["principal"]),
            text(&session["client"]),
            text(&session["program"]),
            text(&session["devices"]),
            bytes(session["device_memory"].as_f64()),
            number(session["sm_percent"].as_f64()),
            number(rate("commands")),
            bytes(rate("bytes_in")),
            bytes(rate("bytes_out")),
            match (session["parked_seconds"].as_u64(), session["memory_away"].as_u64()) {
                (Some(_), _) => Cell::Text("parked".into()),
                // Its device memory.
                (None, Some(1..)) => Cell::Text("away".into()),
                (None, _) => session["seconds"].as_f64().map_or(Cell::Unknown, Cell::Seconds),
            },
        ]
    };
    each(sample, "rgpu-server", "sessions").map(row).collect()
}

/// Sums of the sessions of a program.
#[derive(Default)]
struct Sums {
    sessions: u32,
    others: [Option<f64>; 7],
}

fn programs(sample: &Sample, rates: &Rates<'_>) -> Vec<Row> {
    let mut programs: BTreeMap<String, Sums> = BTreeMap::new();
    for (socket, session) in each(sample, "rgpu-server", "sessions") {
        let rate = |counter| rates.of(&socket, session, counter);
        let sums = programs.entry(clean(&session["program"])).or_default();
        sums.sessions += 1;
        let values = [
            session["device_memory"].as_f64(),
            session["sm_percent"].as_f64(),
            rate("commands"),
            rate("launches"),
            rate("round_trips"),
            rate("bytes_in"),
            rate("bytes_out"),
        ];
        for (sum, value) in sums.others.iter_mut().zip(values) {
            *sum = value.map(|value| sum.unwrap_or(0.0) + value).or(*sum);
        }
    }
    let row = |(program, Sums { sessions, others: [memory, sm, commands, launches, trips, into, out] })| {
        vec![
            Cell::Text(program),
            Cell::Number(f64::from(sessions)),
            bytes(memory),
            number(sm),
            number(commands),
            number(launches),
            number(trips),
            bytes(into),
            bytes(out),
        ]
    };
    programs.into_iter().map(row).collect()
}

fn gpus(sample: &Sample) -> Vec<Row> {
    let row = |(_, gpu): (String, &Value)| {
        vec![
            number(gpu["gpu"].as_f64()),
            text(&gpu["name"]),
            number(gpu["sessions"].as_f64()),
            number(gpu["utilization_percent"].as_f64()),
            bytes(gpu["session_memory"].as_f64()),
            bytes(gpu["memory_away"].as_f64()),
            bytes(gpu["memory_used"].as_f64()),
            bytes(gpu["memory_free"].as_f64()),
            number(gpu["temperature_celsius"].as_f64()),
            number(gpu["power_watts"].as_f64()),
            Cell::Text(if gpu["healthy"] == true { "ok" } else { "NOT WELL" }.into()),
        ]
    };
    each(sample, "rgpu-server", "gpus").map(row).collect()
}

fn links(sample: &Sample, rates: &Rates<'_>) -> Vec<Row> {
    let mut serves: HashMap<(String, u64), String> = HashMap::new();
    for (socket, process) in each(sample, "vhost-rgpu", "device_processes") {
        serves.insert((socket, process["process"].as_u64().unwrap_or(0)), clean(&process["serves"]));
    }
    let row = |(socket, session): (String, &Value)| {
        let rate = |counter| rates.of(&socket, session, counter);
        // With the transport local, a session's data does not pass through vhost-rgpu.
        let relayed = session["transport"] != "local";
        let server = clean(&session["server"]);
        vec![
            serves
                .get(&(socket.clone(), session["process"].as_u64().unwrap_or(0)))
                .map_or(Cell::Unknown, |serves| Cell::Text(serves.clone())),
            text(&session["program"]),
            Cell::Text(server.strip_prefix("tcp:").unwrap_or(&server).to_owned()),
            text(&session["transport"]),
            session["round_trip_us"].as_f64().map_or(Cell::Unknown, |us| Cell::Short(us / 1e6)),
            number(rate("commands").filter(|_| relayed)),
            bytes(rate("data_bytes_sent").filter(|_| relayed)),
            bytes(rate("data_bytes_received").filter(|_| relayed)),
            text(&session["state"]),
        ]
    };
    each(sample, "vhost-rgpu", "sessions").map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::time::{Duration, Instant};

    fn server(commands: &[(u64, &str, u64)]) -> Value {
        let sessions: Vec<Value> = commands
            .iter()
            .map(|(worker, program, commands)| {
                json!({"worker": worker, "principal": "host1", "client": "vm1", "program": program, "devices": "0",
                    "device_memory": 1 << 30, "sm_percent": null, "commands": commands, "launches": commands / 2,
                    "bytes_in": 0, "bytes_out": 0, "round_trips": 0, "seconds": 61, "parked_seconds": null})
            })
            .collect();
        json!({"daemon": "rgpu-server", "version": "1", "max_sessions": 256, "sessions": sessions})
    }

    fn app(first: Value, second: Value) -> App {
        let at = Instant::now();
        let mut app = App::new(Sample::of(at, vec![("/s", Ok(first))]));
        app.take(Sample::of(at + Duration::from_secs(2), vec![("/s", Ok(second))]));
        app
    }

    fn press(app: &mut App, code: KeyCode) -> Order {
        app.key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    fn column(app: &App, place: usize) -> Vec<String> {
        app.rows.iter().map(|row| row[place].shown()).collect()
    }

    #[test]
    fn rates_follow_from_two_samples_and_the_busiest_comes_first() {
        let before = server(&[(1, "slow", 100), (2, "fast", 1000)]);
        let app = app(before, server(&[(1, "slow", 120), (2, "fast", 9000), (3, "new", 50)]));
        assert_eq!(column(&app, 2), ["fast", "slow", "new"]);
        assert_eq!(column(&app, 6), ["4.0k", "10", "-"]);
        assert_eq!((column(&app, 4)[0].as_str(), column(&app, 9)[0].as_str()), ("1.0G", "1:01"));
    }

    #[test]
    fn keys_choose_view_column_and_direction() {
        let all = [(1, "b", 0), (2, "a", 0), (3, "a", 0)];
        let mut app = app(server(&all), server(&[(1, "b", 20), (2, "a", 4), (3, "a", 8)]));
        press(&mut app, KeyCode::Char('r'));
        assert_eq!(column(&app, 6), ["2", "4", "10"]);
        for _ in 0..4 {
            press(&mut app, KeyCode::Left);
        }
        press(&mut app, KeyCode::Char('r'));
        assert_eq!((app.sorting().column, column(&app, 2)[0].as_str()), (2, "b"));
        press(&mut app, KeyCode::Char('2'));
        assert_eq!(
            (column(&app, 0), column(&app, 1)),
            (vec!["b".into(), "a".into()], vec!["1".into(), "2".into()])
        );
        assert_eq!(column(&app, 4), ["10", "6"]);
        press(&mut app, KeyCode::End);
        assert_eq!(app.offset, 1);
        press(&mut app, KeyCode::Tab);
        assert_eq!((app.view, app.offset), (View::Gpus, 0));
        assert_eq!(press(&mut app, KeyCode::Char('q')), Order::Quit);
    }

    #[test]
    fn a_pause_keeps_what_is_shown() {
        let mut app = app(server(&[(1, "a", 0)]), server(&[(1, "a", 2)]));
        press(&mut app, KeyCode::Char('p'));
        app.take(Sample::of(Instant::now(), vec![("/s", Ok(server(&[])))]));
        assert_eq!(app.rows.len(), 1);
    }

    #[test]
    fn unexpected_fields_of_a_status_are_skipped() {
        let odd = json!({"daemon": "rgpu-server", "sessions": [{"program": "a\u{1b}[2J", "commands": -1}, 7, null], "gpus": [{}]});
        let mut app = app(odd.clone(), odd);
        for view in ['1', '2', '3', '4'] {
            press(&mut app, KeyCode::Char(view));
            for row in &app.rows {
                assert!(row.iter().all(|cell| !cell.shown().contains('\u{1b}')));
                assert_eq!(row.len(), app.view.columns().len());
            }
        }
        assert!(!app.summary().is_empty());
    }

    #[test]
    fn numbers_are_short() {
        for (cell, shown) in [
            (Cell::Number(999.0), "999"),
            (Cell::Number(999_999.0), "1.0M"),
            (Cell::Bytes(1536.0), "1.5K"),
            (Cell::Bytes(80e9), "75G"),
            (Cell::Seconds(59.0), "0:59"),
            (Cell::Seconds(3700.0), "1h01"),
            (Cell::Seconds(200_000.0), "2d07"),
            (Cell::Short(0.000_25), "250µs"),
            (Cell::Short(0.03), "30ms"),
        ] {
            assert_eq!(cell.shown(), shown);
        }
    }
}
