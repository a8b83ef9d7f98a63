//! Hands over to another program, and to a service manager. This test's program plays all of these processes.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::net::UnixDatagram;
use std::process::{Command, ExitCode};

use rgpu_handover::{Inherited, Store};

/// The environment variable that tells a process which part it plays.
const ROLE: &str = "HANDOVER_TEST";

fn main() -> ExitCode {
    match std::env::var(ROLE).as_deref() {
        Ok("first") => first(),
        Ok("second") => second(),
        Ok("keeps many") => keep_many(),
        Ok("has many") => has_many(),
        _ => test(),
    }
    ExitCode::SUCCESS
}

fn file(text: &str) -> File {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(text.as_bytes()).expect("writing");
    file
}

/// Keeps two files and executes this program again.
fn first() {
    let store = Store::new();
    store.keep("greeting", &file("hello")).expect("keeping");
    store.keep("other", &file("replaced")).expect("keeping");
    store.keep("other", &file("kept")).expect("keeping");
    store.keep("gone", &file("gone")).expect("keeping");
    store.forget("gone");
    store.wait_until_sent();
    let program = std::env::current_exe().expect("this program");
    let missing = store.exec(std::path::Path::new("/nonexistent/program"), &[]);
    assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
    // SAFETY: this process has one thread.
    unsafe { std::env::set_var(ROLE, "second") };
    let arguments: Vec<OsString> = std::env::args_os().collect();
    panic!("not executed: {}", store.exec(&program, &arguments));
}

/// Checks that it got what the previous program kept.
fn second() {
    let mut inherited = Inherited::take();
    assert_eq!(inherited.names(""), ["greeting", "other"]);
    for (name, text) in [("greeting", "hello"), ("other", "kept")] {
        let mut file = File::from(inherited.remove(name).expect("inherited"));
        let mut found = String::new();
        file.rewind().expect("rewinding");
        file.read_to_string(&mut found).expect("reading");
        assert_eq!(found, text);
    }
    // A program that this one starts inherits none of it.
    assert!(std::env::var("LISTEN_FDS").is_err());
    println!("handed over");
}

/// How many files are kept, under names that are longer together than a variable of the environment may be.
const MANY: usize = 700;

fn long_name(number: usize) -> String {
    format!("{number:0200}")
}

/// Keeps many files and executes this program again.
fn keep_many() {
    let store = Store::default();
    for number in 0..MANY {
        store.keep(&long_name(number), &file(&number.to_string())).expect("keeping");
    }
    // SAFETY: this process has one thread.
    unsafe { std::env::set_var(ROLE, "has many") };
    let program = std::env::current_exe().expect("this program");
    let arguments: Vec<OsString> = std::env::args_os().collect();
    panic!("not executed: {}", store.exec(&program, &arguments));
}

fn has_many() {
    let mut inherited = Inherited::take();
    assert_eq!(inherited.names("").len(), MANY);
    for number in 0..MANY {
        let mut file = File::from(inherited.remove(&long_name(number)).expect("inherited"));
        let mut found = String::new();
        file.rewind().expect("rewinding");
        file.read_to_string(&mut found).expect("reading");
        assert_eq!(found, number.to_string());
    }
    println!("handed over");
}

/// Runs this program in a role, which has to succeed.
fn play(role: &str, prepare: impl FnOnce(&mut Command)) {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    prepare(command.env(ROLE, role));
    let output = command.output().expect("starting");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "handed over\n");
}

fn test() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).expect("a socket");
    play("first", |command| {
        command.env("NOTIFY_SOCKET", &path).env("LISTEN_FDS", "7").env("LISTEN_PID", "1");
    });
    manager.set_nonblocking(true).expect("a socket");
    let mut heard = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(length) = manager.recv(&mut buffer) {
        heard.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
    }
    let stored = |name: &str| format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}");
    let removed = |name: &str| format!("FDSTOREREMOVE=1\nFDNAME={name}");
    let expected = [
        stored("greeting"),
        stored("other"),
        removed("other"),
        stored("other"),
        stored("gone"),
        removed("gone"),
    ];
    assert_eq!(heard, expected);
    println!("test handed_over_to_a_program_and_to_a_service_manager ... ok");
    play("keeps many", |_| ());
    println!("test more_names_are_handed_over_than_the_environment_takes ... ok");
}
