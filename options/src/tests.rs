use std::path::Path;

use clap::{Args, CommandFactory, Parser};

use super::document::{Part, example, table};
use super::{Common, Error, File, Given, Layer, parse_filter, parse_size};

#[derive(Debug, Args, PartialEq)]
struct Options {
    /// How many at most
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=9))]
    most: u32,
    /// Where to listen; may be given more than once
    #[arg(id = "net.listen", long = "listen", default_value = "here")]
    listen: Vec<String>,
    /// Which way
    #[arg(long, value_parser = ["up", "down"])]
    way: Option<String>,
    #[arg(long, hide = true)]
    secret: Option<String>,
}

#[derive(Debug, Parser)]
struct Daemon {
    #[command(flatten)]
    options: Options,
}

fn read(file: Option<&str>, given: &[&str]) -> Result<Options, Error> {
    let given = Given::parse(Daemon::command(), std::iter::once("daemon").chain(given.iter().copied()));
    let file = file.map(|text| File::parse(Path::new("x.toml"), text, &["part"])).transpose()?;
    let section = file.as_ref().and_then(|file| Some((file, file.sections("").next()?)));
    Layer { given: &given, section }.read()
}

fn error(text: &str) -> String {
    read(Some(text), &[]).unwrap_err().to_string()
}

#[test]
fn the_file_overrides_defaults_and_the_command_line_overrides_the_file() {
    let file = Some("most = 5\n[net]\nlisten = [\"a\", \"b\"]\n");
    assert_eq!(read(None, &[]).unwrap().most, 4);
    let from_file = read(file, &[]).unwrap();
    assert_eq!((from_file.most, from_file.listen), (5, vec!["a".to_owned(), "b".into()]));
    let given = read(file, &["--most", "6", "--listen", "c"]).unwrap();
    assert_eq!((given.most, given.listen, given.way), (6, vec!["c".to_owned()], None));
    // A flag that repeats the default overrides the file, too.
    assert_eq!(read(file, &["--most=4"]).unwrap().most, 4);
}

#[test]
fn an_error_names_the_line_and_the_key() {
    assert_eq!(error("\ncolour = 1\n"), "x.toml: line 2: colour: there is no such option");
    assert_eq!(error("[net]\ncolour = 1\n"), "x.toml: line 2: net.colour: there is no such option");
    assert_eq!(error("most = 12\n"), "x.toml: line 1: most: 12 is not in 1..=9");
    for text in ["many", "", "1.5"] {
        let expected = "x.toml: line 1: most: must be a whole number of 0 or more";
        assert_eq!(error(&format!("most = {text:?}\n")), expected);
    }
    let far = error("most = \"99999999999999999999\"\n");
    assert_eq!(far, "x.toml: line 1: most: the number is too large");
    assert_eq!(error("way = \"left\"\n"), "x.toml: line 1: way: \"left\" is not one of up, down");
    assert_eq!(error("way = [\"up\", \"down\"]\n"), "x.toml: line 1: way: must be a single value");
    assert!(error("most = 1.5\n").starts_with("x.toml: line 1: most: must be a string"));
    assert!(error("\n\nmost = \n").starts_with("x.toml: line 3: "));
    // A wrong value is an error even where the command line overrides it.
    assert!(read(Some("most = 12\n"), &["--most=1"]).is_err());
}

#[test]
fn a_section_that_is_there_twice_is_named() {
    let twice = "[net] # one\nlisten = \"a\"\n\n[net]\nlisten = \"b\"\n";
    assert_eq!(
        error(twice),
        "x.toml: line 4: there is a section [net] already, in line 1: put the keys there"
    );
    assert_eq!(error("most = 1\nmost = 2\n"), "x.toml: line 2: duplicate key");
}

#[test]
fn an_option_in_the_wrong_section_is_told_where_it_belongs() {
    let no_such = |key: &str| format!("{key}: there is no such option; there is");
    let above = "most outside any section: its line has to be above the first section";
    assert_eq!(error("[net]\nmost = 1\n"), format!("x.toml: line 2: {} {above}", no_such("net.most")));
    assert_eq!(error("listen = \"a\"\n"), format!("x.toml: line 1: {} net.listen", no_such("listen")));
    assert_eq!(error("[net]\nsecret = \"a\"\n"), "x.toml: line 2: net.secret: there is no such option");

    // In a section of its own, the daemon's options are those of the command line.
    let given = Given::parse(Daemon::command(), ["daemon"]);
    let in_part = |key: &str| {
        let file = File::parse(Path::new("x.toml"), &format!("[part]\n{key} = 1\n"), &["part"]).unwrap();
        let layer = Layer { given: &given, section: file.sections("part").next().map(|part| (&file, part)) };
        layer.read::<Common>().unwrap_err().to_string()
    };
    assert_eq!(in_part("most"), format!("x.toml: line 2: {} {above}", no_such("part.most")));
    // Those that there are not, or that no file has, are nowhere.
    for key in ["moost", "help", "secret", "version", "Options"] {
        assert_eq!(in_part(key), format!("x.toml: line 2: part.{key}: there is no such option"));
    }
}

#[test]
fn a_word_that_is_no_level_is_no_filter_of_the_log() {
    for right in ["info", "WARN", "off", "3", "warn,rgpu_server=debug", "rgpu_server::parent=trace", "[a]"] {
        assert_eq!(parse_filter(right), Ok(right.to_owned()));
    }
    assert_eq!(parse_filter(" info, rgpu_server=debug "), Ok("info,rgpu_server=debug".to_owned()));
    for wrong in ["warning", "verbose", "info,debugg", "rgpu_server", "rgpu_server=warning", "a=b=c"] {
        assert!(parse_filter(wrong).is_err(), "{wrong}");
    }
    assert!(parse_filter("warning").unwrap_err().contains("off, error, warn, info, debug or trace"));
}

#[test]
fn sections_keep_their_order_and_their_lines() {
    let text = "[[part]]\nmost = 1\n[[part]]\nmost = 2\n[part.net]\nlisten = \"x\"\n";
    let file = File::parse(Path::new("x.toml"), text, &["part"]).unwrap();
    let lines: Vec<_> = file.sections("part").map(|part| (part.line, part.line_of("most"))).collect();
    assert_eq!(lines, [(1, 2), (3, 4)]);
    let given = Given::parse(Daemon::command(), ["daemon"]);
    let options = |section| Layer { given: &given, section: Some((&file, section)) }.read::<Options>();
    let listen: Vec<_> = file.sections("part").map(|part| options(part).unwrap().listen).collect();
    assert_eq!(listen, [["here"], ["x"]]);
}

#[test]
fn documents_omit_only_hidden_options() {
    let part = Part {
        name: "part",
        repeated: true,
        commented: false,
        text: "A part.",
        options: Options::augment_args(clap::Command::new("x")),
        set: &[("most", "7")],
        examples: &[("way", "\"up\"")],
    };
    let expected = "# An example.\n\n# A part.\n[[part]]\n# How many at most.\nmost = 7\n# Which way. \"up\". \"down\".\n#: way = \"up\"\n\n\
                    [part.net]\n# Where to listen; may be given more than once.\n#: listen = [\"here\"]\n";
    let mut parts = [part];
    assert_eq!(example("An example.", &parts), expected);
    assert!(table(&parts).contains("| `part.most` | `--most` | `4` | How many at most. |"));
    assert!(table(&parts).contains("| Which way. `up`. `down`. |"));
    parts[0].commented = true;
    let signs = ["[[part]]", "[part.net]", "most = 7"];
    let signed =
        signs.iter().fold(expected.to_owned(), |text, line| text.replace(line, &format!("#: {line}")));
    assert_eq!(example("An example.", &parts), signed);
}

#[test]
fn sizes_may_have_units() {
    assert_eq!(parse_size("0"), Ok(0));
    assert_eq!(parse_size("4G"), Ok(4 << 30));
    assert_eq!(parse_size("512MiB"), Ok(512 << 20));
    assert_eq!(parse_size("4X"), Err("\"X\" is not a unit: K, M, G or T".into()));
    assert_eq!(parse_size("much"), Err("\"much\" is not a number of bytes, such as 4G".into()));
    assert!(parse_size("4X").is_err() && parse_size("").is_err() && parse_size("99999999T").is_err());
}
