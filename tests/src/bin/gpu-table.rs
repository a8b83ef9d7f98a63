//! Runs every test program at full size on this machine's GPU, natively and through rgpu, and prints the
//! times as a Markdown table. Fails if a program does.
//!
//! `cargo xtask stage-gpu` puts it and everything it needs into a folder to take to a machine with a GPU.

use std::process::{Command, ExitCode};

use rgpu_tests::programs::{Way, manifest, passes};

const WAYS: [Way; 3] = [Way::Native, Way::Client("cuda", "local"), Way::Client("cuda", "tcp")];

fn main() -> ExitCode {
    let programs = match manifest() {
        Ok(programs) => programs,
        Err(error) => {
            eprintln!("error: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    println!("Machine: {}\n", machine());
    println!("Wall time of the whole program in seconds, start-up included, at its full size (`--full`).\n");
    println!("| program | native | local | tcp | what it checked |\n|---|---|---|---|---|");
    let mut failed = 0;
    for program in &programs {
        let mut line = format!("| {} ", program.name);
        let mut detail = String::new();
        for way in WAYS {
            match passes(&program.name, way, &["--full"]) {
                Ok(outcome) => {
                    line += &format!("| {:.2} ", outcome.time.as_secs_f64());
                    if way == Way::Native {
                        detail = outcome.verdict(&program.name).unwrap_or_default().to_owned();
                    }
                }
                Err(error) => {
                    failed += 1;
                    line += "| **failed** ";
                    eprintln!("{}, {}: {error:#}", program.name, way.name());
                }
            }
        }
        println!("{line}| {detail} |");
    }
    println!("\n{} runs, {failed} failed.", programs.len() * WAYS.len());
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The GPU and the processors of this machine.
fn machine() -> String {
    let query = ["--query-gpu=name,driver_version", "--format=csv,noheader"];
    let gpu = Command::new("nvidia-smi").args(query).output().map_or_else(
        |_| "no nvidia-smi".to_owned(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    );
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{} (name, driver), {cores} cores", gpu.replace('\n', "; "))
}
