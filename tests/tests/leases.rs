//! Leases as programs and operators use them: chosen across servers by `rgpuctl run --gpus`, named in
//! `RGPU_SERVERS`, listed, and released.

mod support;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rgpu_tests::programs::{self, LIMIT, Outcome};
use rgpu_tests::tree;
use serde_json::Value;
use support::{Rig, Transport, eventually};

/// Servers with software GPUs, and the pool's file that lists them.
struct Pool {
    rigs: Vec<Rig>,
    folder: tempfile::TempDir,
}

impl Pool {
    /// This many GPUs on each server, with these rules.
    fn start(name: &str, gpus: &[&str], rules: &str) -> Result<Pool> {
        let folder = tempfile::tempdir()?;
        let clients = folder.path().join("clients.toml");
        std::fs::write(&clients, rules)?;
        let clients = clients.display().to_string();
        let start = |(number, gpus): (usize, &&str)| {
            let flags = ["--software-devices", gpus, "--software-memory", "1G", "--clients", &clients];
            Rig::with(&format!("{name}-{number}"), &flags, &[])
        };
        let rigs = gpus.iter().enumerate().map(start).collect::<Result<Vec<_>>>()?;
        for rig in &rigs {
            eventually(|| {
                let ready = rig.server.status()?["workers_ready"].as_u64();
                ensure!(ready > Some(0), "no worker is ready");
                Ok(())
            })?;
        }
        let servers: Vec<String> = rigs.iter().map(|rig| format!("\"127.0.0.1:{}\"", rig.port)).collect();
        std::fs::write(folder.path().join("pool.toml"), format!("servers = [{}]\n", servers.join(", ")))?;
        Ok(Pool { rigs, folder })
    }

    fn file(&self) -> String {
        self.folder.path().join("pool.toml").display().to_string()
    }

    /// `rgpuctl COMMAND --insecure --pool FILE …`.
    fn rgpuctl(&self, command: &str, words: &[&str]) -> Result<Outcome> {
        let mut rgpuctl = rgpuctl(command);
        programs::run(rgpuctl.args(["--pool", &self.file()]).args(words), LIMIT)
    }

    /// The output of a program that `rgpuctl run` ran with these GPUs.
    fn run(&self, words: &[&str], program: &str) -> Result<Outcome> {
        let program = programs::built(program)?.display().to_string();
        self.rgpuctl("run", &[words, &["--", &program]].concat())
    }

    /// All servers' leases, as the servers report them.
    fn leases(&self) -> Result<Vec<Value>> {
        let mut all = Vec::new();
        for rig in &self.rigs {
            all.extend(rig.server.status()?["leases"].as_array().context("no leases")?.iter().cloned());
        }
        Ok(all)
    }
}

fn rgpuctl(command: &str) -> Command {
    let mut rgpuctl = Command::new(tree::binaries().join("rgpuctl"));
    rgpuctl.args([command, "--insecure"]).env("RGPU_LIB_DIR", tree::guest_libraries());
    rgpuctl
}

fn json(outcome: &Outcome) -> Result<Value> {
    serde_json::from_str(&outcome.stdout).with_context(|| format!("{outcome:?}"))
}

#[test]
fn a_program_gets_gpus_chosen_among_servers_and_they_are_released() -> Result<()> {
    let pool = Pool::start("lease-run", &["2", "1"], "exclusive_leases = true\n")?;
    let outcome = pool.run(&["--gpus", "3", "--exclusive"], "device_list")?;
    ensure!(outcome.verdict("device_list")? == "3 device(s)", "{outcome:?}");
    ensure!(pool.leases()?.is_empty(), "{:?}", pool.leases()?);
    pool.rigs.iter().try_for_each(Rig::has_no_sessions)?;
    // Somebody else holds two of them exclusively.
    let held = pool.rgpuctl("lease", &["--gpus", "2", "--exclusive", "--name", "somebody", "--json"])?;
    let held = json(&held)?;
    ensure!(held["leases"].as_array().map(Vec::len) == Some(1), "both of one server: {held}");
    let outcome = pool.run(&["--gpus", "1"], "device_list")?;
    ensure!(outcome.verdict("device_list")? == "1 device(s)", "{outcome:?}");
    let outcome = pool.run(&["--gpus", "2"], "device_list")?;
    ensure!(outcome.status == Some(125) && outcome.stderr.contains("1 of the 3 GPUs"), "{outcome:?}");
    // What no server has is not waited for.
    let outcome = pool.run(&["--gpus", "1", "--model", "H100", "--wait", "3600"], "device_list")?;
    ensure!(outcome.status == Some(125) && outcome.stderr.contains("1 GPU (H100) can never"), "{outcome:?}");
    let outcome = pool.rgpuctl("lease", &["--gpus", "4", "--wait", "3600"])?;
    ensure!(outcome.status == Some(4) && outcome.stderr.contains("has 2 among its 2"), "{outcome:?}");
    let inventory = json(&pool.rgpuctl("inventory", &["--json"])?)?;
    let taken = inventory.as_array().context("no list")?.iter().filter(|gpu| gpu["exclusive"] == true);
    ensure!(taken.count() == 2, "{inventory}");
    let leases = json(&pool.rgpuctl("leases", &["--json"])?)?;
    ensure!(leases[0]["name"] == "somebody" && leases[0]["devices"] == "0,1", "{leases}");
    // The program waits for the GPU until it is released.
    let servers = held["servers"].as_str().context("no servers")?;
    let mut waiting = rgpuctl("run");
    let program = programs::built("device_list")?;
    waiting.args(["--pool", &pool.file(), "--gpus", "3", "--wait", "600", "--"]).arg(&program);
    let waiting = std::thread::spawn(move || programs::run(&mut waiting, LIMIT));
    let released = programs::run(rgpuctl("release").env("RGPU_SERVERS", servers), LIMIT)?;
    ensure!(released.status == Some(0), "{released:?}");
    let outcome = waiting.join().ok().context("a thread has panicked")??;
    ensure!(outcome.verdict("device_list")? == "3 device(s)", "{outcome:?}");
    ensure!(pool.leases()?.is_empty(), "{:?}", pool.leases()?);
    Ok(())
}

#[test]
fn a_program_that_finds_a_lease_in_its_environment_runs_under_it() -> Result<()> {
    let pool = Pool::start("lease-native", &["2"], "lease_required = true\n")?;
    let (rig, mut keys) = (&pool.rigs[0], Vec::new());
    for transport in support::TRANSPORTS {
        let server = match transport {
            Transport::Local => format!("unix:{}", rig.server_socket().display()),
            Transport::Tcp => support::on_this_host(rig.port),
        };
        let outcome = programs::run(&mut rig.program(transport, "device_list")?, LIMIT)?;
        ensure!(outcome.stderr.contains("sessions need a lease"), "{outcome:?}");
        let lease = ["--server", &server, "--gpus", "1", "--memory", "64M"];
        let leased = programs::run(rgpuctl("lease").args(lease), LIMIT)?;
        ensure!(leased.status == Some(0) && leased.stderr.contains("shared"), "{leased:?}");
        let servers = leased.stdout.trim();
        keys.push(servers.rsplit('#').next().context("no key")?.to_owned());
        let run = |servers: &str, program: &str| -> Result<Outcome> {
            programs::run(rig.program(transport, program)?.env("RGPU_SERVERS", servers), LIMIT)
        };
        let outcome = run(servers, "device_list")?;
        ensure!(outcome.verdict("device_list")? == "1 device(s)", "{outcome:?}");
        run(servers, "vectorAdd")?.verdict("vectorAdd")?;
        // The same through a private vhost-rgpu. The key does not show in this machine's process list.
        let program = programs::built("device_list")?;
        let mut own = rgpuctl("run");
        let outcome = programs::run(own.args(["--server", servers, "--"]).arg(&program), LIMIT)?;
        ensure!(outcome.verdict("device_list")? == "1 device(s)", "{outcome:?}");
        let mut own = rgpuctl("run");
        let outcome = programs::run(own.env("RGPU_SERVERS", servers).arg("--").arg(program), LIMIT)?;
        ensure!(outcome.verdict("device_list")? == "1 device(s)", "{outcome:?}");
        let renewed = programs::run(rgpuctl("renew").arg(servers), LIMIT)?;
        ensure!(renewed.status == Some(0), "{renewed:?}");
        // The operator releases it.
        let id = rig.server.status()?["leases"][0]["id"].as_str().context("no lease")?.to_owned();
        let released = operator(&rig.server_admin(), "release", &[&id])?;
        ensure!(released.status == Some(0), "{released:?}");
        let outcome = run(servers, "device_list")?;
        ensure!(outcome.stderr.contains("has no such lease"), "{outcome:?}");
        let released = programs::run(rgpuctl("release").arg(servers), LIMIT)?;
        ensure!(released.status == Some(1) && released.stderr.contains("has no such lease"), "{released:?}");
        let wrong = run(&format!("{server}#abc"), "device_list")?;
        ensure!(wrong.stderr.contains("64 hexadecimal digits"), "{wrong:?}");
    }
    let listed = operator(&rig.server_admin(), "leases", &["--json"])?;
    ensure!(json(&listed)? == Value::Array(Vec::new()), "{listed:?}");
    for log in rig.daemons().map(|daemon| daemon.log_text()) {
        let key = keys.iter().find(|key| log.contains(key.as_str()));
        ensure!(key.is_none(), "a key is in a log:\n{log}");
    }
    Ok(())
}

/// `rgpuctl COMMAND` on the server.
fn operator(socket: &Path, command: &str, words: &[&str]) -> Result<Outcome> {
    let mut rgpuctl = Command::new(tree::binaries().join("rgpuctl"));
    programs::run(rgpuctl.arg(command).arg("--socket").arg(socket).args(words), LIMIT)
}
