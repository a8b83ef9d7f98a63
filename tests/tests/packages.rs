//! The Debian packages of `cargo xtask package`: their pages and completions, and their installation, use,
//! upgrade and purge in machines with Debian 12 and 13 and systemd. The daemons run under their own units
//! there.

#[path = "support/packages.rs"]
mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use rgpu_tests::machine::systemd::Release;
use rgpu_tests::machine::{Machine, systemd};
use rgpu_tests::{programs, tree};
use support::*;

/// The packages of a machine that is both server and host. Such a machine is not a guest.
const INSTALLED: [&str; 4] = ["rgpu-server", "vhost-rgpu", "rgpuctl", "rgpu-libs"];

/// Slurm's package. It is installed late: on a machine without Slurm, `rgpuctl doctor` would miss that.
const SLURM: &str = "rgpu-slurm";
const TIMER: &str = "rgpu-slurm.timer";

/// Unpacks packages into a folder.
fn unpacked(names: &[&str]) -> Result<tempfile::TempDir> {
    let folder = tempfile::tempdir()?;
    for name in names {
        output(Command::new("dpkg-deb").arg("-x").arg(package(name)?).arg(folder.path()))?;
    }
    Ok(folder)
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() { found.extend(files(&path)?) } else { found.push(path) }
    }
    found.sort();
    Ok(found)
}

#[test]
fn man_pages_are_well_formed_and_complete() -> Result<()> {
    let folder = unpacked(&INSTALLED)?;
    let pages = files(&folder.path().join("usr/share/man"))?;
    let names: BTreeSet<String> = pages
        .iter()
        .map(|page| page.file_name().unwrap_or_default().to_string_lossy().into_owned())
        .collect();
    for page in ["rgpu-server.8.gz", "rgpu-server-check.8.gz", "vhost-rgpu.8.gz", "rgpuctl.1.gz"] {
        ensure!(names.contains(page), "{page} is missing: {names:?}");
    }
    let help = output(Command::new(folder.path().join("usr/bin/rgpuctl")).arg("--help"))?;
    let commands = help.split("Commands:").nth(1).and_then(|rest| rest.split("Options:").next());
    let commands: Vec<&str> = commands
        .context("rgpuctl --help lists no commands")?
        .lines()
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect();
    ensure!(commands.len() >= 10, "rgpuctl --help lists {commands:?}");
    for command in commands {
        ensure!(
            names.contains(&format!("rgpuctl-{command}.1.gz")),
            "rgpuctl {command} has no page: {names:?}"
        );
    }
    for page in &pages {
        let mut man = Command::new("man");
        man.args(["--warnings=all", "--encoding=UTF-8", "-l"])
            .arg(page)
            .env("MANWIDTH", "100")
            .env("LC_ALL", "C.UTF-8");
        let formatted = man.output().context("cannot run man")?;
        let complaints = String::from_utf8_lossy(&formatted.stderr).into_owned();
        ensure!(formatted.status.success() && complaints.is_empty(), "{}: {complaints}", page.display());
        let text = String::from_utf8_lossy(&formatted.stdout).into_owned();
        for heading in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "SEE ALSO"] {
            ensure!(text.lines().any(|line| line == heading), "{} has no {heading}:\n{text}", page.display());
        }
    }
    for program in ["rgpu-server", "vhost-rgpu", "rgpuctl"] {
        let page = pages.iter().find(|page| page.to_string_lossy().contains(&format!("/{program}.")));
        let text = output(Command::new("zcat").arg(page.context("there is a page")?))?;
        ensure!(text.contains(".SH \"EXIT STATUS\""), "{program} explains no exit status");
    }
    Ok(())
}

#[test]
fn shells_complete_commands_and_options() -> Result<()> {
    let folder = unpacked(&INSTALLED)?;
    let share = folder.path().join("usr/share");
    for (shell, place) in [
        (["bash", "-n"], "bash-completion/completions"),
        (["zsh", "-n"], "zsh/vendor-completions"),
        (["fish", "--no-execute"], "fish/vendor_completions.d"),
    ] {
        let scripts = files(&share.join(place))?;
        ensure!(scripts.len() == 3, "{place} has {scripts:?}");
        for script in scripts {
            output(Command::new(shell[0]).arg(shell[1]).arg(script))?;
        }
    }
    let bash = share.join("bash-completion/completions/rgpuctl");
    let ask = |words: &str, word: &str, before: &str| {
        let script = format!(
            ". {}; COMP_WORDS=({words} {word}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _rgpuctl rgpuctl '{word}' {before}; echo ${{COMPREPLY[@]}}",
            bash.display()
        );
        output(Command::new("bash").args(["-c", &script]))
    };
    ensure!(ask("rgpuctl", "ru", "rgpuctl")?.trim() == "run", "bash does not complete a command");
    let options = ask("rgpuctl run", "--tr", "run")?;
    ensure!(options.trim() == "--transport", "bash completes --tr with {options:?}");
    let path = format!("{}:{}", folder.path().join("usr/bin").display(), std::env::var("PATH")?);
    let script = format!(
        "source {}; complete -C 'rgpuctl ru'",
        share.join("fish/vendor_completions.d/rgpuctl.fish").display()
    );
    let fish = output(Command::new("fish").args(["--no-config", "-c", &script]).env("PATH", path))?;
    ensure!(fish.starts_with("run\t"), "fish completes rgpuctl ru with {fish:?}");
    Ok(())
}

#[test]
fn the_package_for_slurm_has_its_script_and_a_timer_that_runs_it() -> Result<()> {
    let folder = unpacked(&[SLURM])?;
    let script = folder.path().join("usr/lib/rgpu/rgpu-slurm");
    let settings = output(Command::new(&script).arg("settings"))?;
    ensure!(settings.contains("POOL=/etc/rgpu/pool.toml"), "{settings}");
    let units = folder.path().join("usr/lib/systemd/system");
    let unit = |name: &str| {
        std::fs::read_to_string(units.join(name)).with_context(|| format!("the package has no {name}"))
    };
    ensure!(unit("rgpu-slurm.service")?.contains("ExecStart=/usr/lib/rgpu/rgpu-slurm renew"));
    ensure!(unit("rgpu-slurm.timer")?.contains("WantedBy=timers.target"));
    Ok(())
}

/// Revisions of a version can differ in what packages expect of each other.
#[test]
fn packages_depend_on_others_of_their_revision() -> Result<()> {
    let wanted = [(SLURM, &["rgpuctl", "rgpu-libs", "vhost-rgpu"][..]), ("rgpu-guest", &["rgpu-libs"])];
    for (name, others) in wanted {
        let field = |field: &str| output(Command::new("dpkg-deb").arg("-f").arg(package(name)?).arg(field));
        let (version, depends) = (field("Version")?, field("Depends")?);
        for other in others {
            let wanted = format!("{other} (>= {})", version.trim());
            ensure!(depends.split(',').any(|one| one.trim() == wanted), "{name} depends on {depends}");
        }
    }
    Ok(())
}

#[test]
fn needrestart_leaves_the_daemons_alone() -> Result<()> {
    let folder = unpacked(&INSTALLED)?;
    // As needrestart reads them, and looks a unit up.
    let script = r#"our %nrconf = (override_rc => {}); my $folder = shift;
        for my $file (glob("$folder/*.conf")) { eval do { local (@ARGV, $/) = $file; <> }; die $@ if $@; }
        for my $unit (@ARGV) { my ($key) = grep { $unit =~ /$_/ } keys %{$nrconf{override_rc}};
            print "$unit ", $key ? $nrconf{override_rc}{$key} : 'restarts', "\n"; }"#;
    let units = ["rgpu-server.service", "vhost-rgpu.service", "ssh.service"];
    let said = output(
        Command::new("perl")
            .args(["-e", script])
            .arg(folder.path().join("etc/needrestart/conf.d"))
            .args(units),
    )?;
    ensure!(said == "rgpu-server.service 0\nvhost-rgpu.service 0\nssh.service restarts\n", "{said}");
    Ok(())
}

#[test]
fn logrotate_moves_the_audit_log_of_the_pages_away_and_tells_the_daemon() -> Result<()> {
    let folder = unpacked(&["rgpu-server"])?;
    let rules = std::fs::read_to_string(folder.path().join("etc/logrotate.d/rgpu-server"))?;
    let pattern = rules.lines().find_map(|line| line.strip_suffix(" {")).context("no files are named")?;
    let (begin, end) = pattern.split_once('*').with_context(|| format!("{pattern} is one file"))?;
    let page = std::fs::read_to_string(tree::root().join("docs/access.md"))?;
    let log = page.split("audit_log = \"").nth(1).and_then(|rest| rest.split('"').next());
    let log = log.context("docs/access.md names no audit log")?;
    ensure!(log.starts_with(begin) && log.ends_with(end), "{log} does not fit {pattern}");
    ensure!(rules.contains("systemctl kill --signal=HUP --kill-who=main rgpu-server.service"), "{rules}");
    Ok(())
}

/// A machine that has the packages' files, but has not installed them.
fn boot(release: Release, newer: &[PathBuf]) -> Result<Machine> {
    let builder = contents(systemd::builder(release)?, &INSTALLED, newer, &["vectorAdd", "idle"])?;
    let builder = builder.file(package(SLURM)?, "/host/slurm/rgpu-slurm.deb");
    systemd::boot(builder.file(package("rgpu-guest")?, "/host/guest/rgpu-guest.deb"))
}

/// A property of a unit.
fn property(machine: &Machine, unit: &str, name: &str) -> Result<String> {
    machine.check(&format!("systemctl show --value -p {name} {unit}"), LONG)
}

fn status(machine: &Machine, daemon: &str) -> Result<serde_json::Value> {
    let path = format!("/run/rgpu/{daemon}.status");
    let text = machine.check(&format!("rgpuctl status --json --socket {path}"), LONG)?;
    let mut status: serde_json::Value = serde_json::from_str(&text)?;
    Ok(status[path.as_str()].take())
}

/// Workers that the server keeps ready by default.
const WORKERS: usize = 2;

/// A daemon's status once that meets a condition.
fn status_once(
    machine: &Machine,
    daemon: &str,
    condition: impl Fn(&serde_json::Value) -> bool,
) -> Result<serde_json::Value> {
    let deadline = Instant::now() + LONG;
    loop {
        let status = status(machine, daemon)?;
        if condition(&status) {
            return Ok(status);
        }
        ensure!(Instant::now() < deadline, "{daemon} does not come to rest: {status}");
    }
}

/// Length of a list in a status.
fn count(status: &serde_json::Value, list: &str) -> usize {
    status[list].as_array().map_or(0, Vec::len)
}

/// Requires that the daemons have logged no warning.
fn quiet(machine: &Machine) -> Result<()> {
    let log = machine
        .check("journalctl -b --no-pager -o cat -u rgpu-server -u vhost-rgpu -u vhost-rgpu.socket", LONG)?;
    // The software GPU cannot map pinned memory, and says so once. On a busy machine, a device process may
    // not answer within the two seconds that its keeper waits.
    let harmless = ["op=\"host_map\"", "does not report its status"];
    let mut lines = log.lines().filter(|line| !harmless.iter().any(|words| line.contains(words)));
    let loud = lines.find(|line| {
        let words = [
            "WARN",
            "ERROR",
            "Failed",
            "failed",
            "denied",
            "Unknown key",
            "deprecated",
            "panicked",
            "\u{1b}",
        ];
        words.iter().any(|word| line.contains(word))
    });
    match loud {
        Some(line) => bail!("the log says: {line}\n{log}"),
        None => Ok(()),
    }
}

/// Runs a program of the machine as a native client of the daemons there, as this user.
fn native(machine: &Machine, user: &str, program: &str) -> Result<()> {
    let run = format!(
        "setpriv --reuid={user} --regid={user} --init-groups env LD_LIBRARY_PATH=/usr/lib/rgpu {PROGRAMS}/{program}"
    );
    let output = machine.run(&run, LONG)?;
    ensure!(output.success() && output.text().contains("PASS"), "{program} as {user}: {output}");
    Ok(())
}

/// A part of the test, by name.
type Phase = (&'static str, fn(&Machine) -> Result<()>);

#[test]
fn packages_are_installed_used_upgraded_and_purged() -> Result<()> {
    let phases = [
        ("installation", installation as fn(&Machine) -> Result<()>),
        ("the units", units),
        ("sessions", sessions),
        ("a session over TLS", over_tls),
        ("cgroups", groups),
        ("a keeper that is replaced", keeper),
        ("reload and restart", reload_and_restart),
        ("a socket for all users", socket_for_all),
        ("a failure that goes away", failure),
        ("upgrade", upgrade),
        ("limits", limits),
        ("a guest's package", guest),
    ];
    in_a_machine(Release::Debian12, &phases)
}

#[test]
fn in_debian_13_sessions_go_on_if_the_server_is_killed() -> Result<()> {
    let phases = [
        ("installation", installation as fn(&Machine) -> Result<()>),
        ("the units", units),
        ("sessions", sessions),
        ("a session over TLS", over_tls),
        ("cgroups", groups),
        ("a keeper that is replaced", keeper),
        ("a server that is killed", killed),
        ("a failure that goes away", failure),
        ("upgrade", upgrade),
    ];
    in_a_machine(Release::Debian13, &phases)
}

/// Boots a machine, runs these parts in it, and purges the packages.
fn in_a_machine(release: Release, phases: &[Phase]) -> Result<()> {
    programs::built("vectorAdd")?;
    let begin = Instant::now();
    let folder = tempfile::tempdir()?;
    let all = [&INSTALLED[..], &[SLURM]].concat();
    let machine = boot(release, &newer(&all, folder.path())?)?;
    let before = inventory(&machine)?;
    println!("{release:?}: booted after {:.0} s", begin.elapsed().as_secs_f64());
    for (name, phase) in phases {
        phase(&machine).context(*name)?;
        println!("{release:?}: {name}: done after {:.0} s", begin.elapsed().as_secs_f64());
    }
    purge(&machine, &all, &["/etc/rgpu/vhost-rgpu.toml", "/var/lib/rgpu/server"], &before).context("purge")
}

fn installation(machine: &Machine) -> Result<()> {
    machine.check("apt-get install -y --no-install-recommends /mnt/packages/*.deb", LONG)?;
    for unit in ["rgpu-server.service", "vhost-rgpu.service", "vhost-rgpu.socket"] {
        machine.check(&format!("systemctl is-active {unit}"), LONG)?;
        ensure!(property(machine, unit, "UnitFileState")? == "enabled", "{unit} is not enabled");
    }
    let lists = machine.check("dpkg -V rgpu-server vhost-rgpu rgpuctl rgpu-libs; dpkg --audit", LONG)?;
    ensure!(lists.is_empty(), "dpkg finds: {lists}");
    Ok(())
}

fn units(machine: &Machine) -> Result<()> {
    let complaints = machine
        .run("systemd-analyze verify rgpu-server.service vhost-rgpu.service vhost-rgpu.socket", LONG)?;
    ensure!(complaints.success() && complaints.stderr.is_empty(), "systemd-analyze verify: {complaints}");
    for unit in ["rgpu-server", "vhost-rgpu"] {
        // A rating of 10 means no protection. The remaining exposure comes from the rights that a daemon
        // needs to start confined processes.
        // On a machine that is slow enough, a failing daemon never comes to a limit of starts.
        let limit = property(machine, unit, "StartLimitIntervalUSec")?;
        ensure!(limit == "0", "{unit} is started only so often within {limit}");
        // The processes that a daemon starts have limits of their own: one must not take another's threads.
        let tasks = property(machine, unit, "TasksMax")?;
        ensure!(tasks == "infinity", "all processes of {unit} together have at most {tasks} threads");
        let rating =
            machine.run(&format!("systemd-analyze security --no-pager --threshold=50 {unit}"), LONG)?;
        ensure!(rating.success(), "systemd-analyze security: {rating}");
        println!("{}", rating.text().lines().last().unwrap_or_default());
    }
    // Every part of the sandbox works: otherwise the log would name what is missing. A daemon that was
    // started answers.
    for (daemon, list) in [("server", "workers"), ("vhost-rgpu", "device_processes")] {
        let status = status(machine, daemon)?;
        ensure!(status.is_object(), "{daemon} reports {status}");
        println!("{daemon}: {}", status[list]);
    }
    let doctor = machine.run("rgpuctl doctor", LONG)?;
    ensure!(doctor.success(), "rgpuctl doctor finds: {doctor}");
    ensure!(doctor.text().contains("native.sock: programs on this host can reach vhost-rgpu"), "{doctor}");
    quiet(machine)
}

fn sessions(machine: &Machine) -> Result<()> {
    native(machine, "root", "vectorAdd")?;
    // Members of the group may use the socket, others may not.
    machine.check(
        "useradd --no-create-home member; usermod -a -G rgpu member; useradd --no-create-home other",
        LONG,
    )?;
    native(machine, "member", "vectorAdd")?;
    let refused =
        native(machine, "other", "vectorAdd").err().context("a user outside the group got a session")?;
    ensure!(refused.to_string().contains("ermission denied"), "{refused}");
    machine.check("userdel member; userdel other", LONG)?;
    let run = machine
        .run(&format!("rgpuctl run --server unix:/run/rgpu/server.sock -- {PROGRAMS}/vectorAdd"), LONG)?;
    ensure!(run.success() && run.text().contains("PASS vectorAdd"), "rgpuctl run: {run}");
    quiet(machine)
}

fn over_tls(machine: &Machine) -> Result<()> {
    machine.check("rgpuctl enroll host --address 127.0.0.1 > /tmp/join && sh /tmp/join", LONG)?;
    let run = machine.run(&format!("rgpuctl run --server 127.0.0.1 -- {PROGRAMS}/vectorAdd"), LONG)?;
    ensure!(run.success() && run.text().contains("PASS vectorAdd"), "rgpuctl run over TLS: {run}");
    let doctor = machine.run("rgpuctl doctor --server 127.0.0.1:9700", LONG)?;
    ensure!(
        doctor.success() && doctor.text().contains("GPUs for this client: 1"),
        "rgpuctl doctor: {doctor}"
    );
    // The doctor notices that the server does not know the client any more.
    machine.check("rgpuctl revoke host", LONG)?;
    let doctor = machine.run("rgpuctl doctor --server 127.0.0.1:9700", LONG)?;
    let says = doctor.text().contains("does not know this client's key");
    ensure!(!doctor.success() && says, "rgpuctl doctor: {doctor}");
    machine.check("rgpuctl enroll host --address 127.0.0.1 > /tmp/join && sh /tmp/join", LONG)?;
    // A guest's own key, which goes with the packages.
    let page = std::fs::read_to_string(tree::root().join("docs/tenants.md"))?;
    let folder = page.split("rgpuctl join --identity ").nth(1).and_then(|rest| rest.split(' ').next());
    let folder = folder.context("docs/tenants.md gives no guest a key of its own")?;
    let join = format!("sed 's|rgpuctl join|& --identity {folder}|' /tmp/join | sh && ls {folder}/key.pem");
    machine.check(&format!("rgpuctl enroll guest1 --address 127.0.0.1 > /tmp/join && {join}"), LONG)?;
    // The same through this host's daemon.
    machine.check(
        "sed -i 's|^server = .*|server = \"tcp:127.0.0.1\"|' /etc/rgpu/vhost-rgpu.toml && systemctl restart vhost-rgpu",
        LONG,
    )?;
    native(machine, "root", "vectorAdd")?;
    quiet(machine)
}

/// The processes that handle clients' data have their own cgroups with limits.
fn groups(machine: &Machine) -> Result<()> {
    let held = Held::start(machine, "groups")?;
    // The doctor is to see the same processes: those of programs that have ended go, and a worker is started
    // in place of the one that serves this program.
    status_once(machine, "server", |status| {
        let pool = (&status["workers_ready"], &status["workers_starting"]);
        pool == (&WORKERS.into(), &0.into()) && count(status, "workers") == WORKERS + 1
    })?;
    status_once(machine, "vhost-rgpu", |status| count(status, "device_processes") == 1)?;
    let doctor = machine.check("rgpuctl doctor", LONG)?;
    for (daemon, unit, list, tasks) in [
        ("server", "rgpu-server", "workers", "4096"),
        ("vhost-rgpu", "vhost-rgpu", "device_processes", "65536"),
    ] {
        let status = status(machine, daemon)?;
        let processes = status[list].as_array().with_context(|| format!("no {list} in {status}"))?.clone();
        ensure!(!processes.is_empty(), "{daemon} has no {list}: {status}");
        for process in processes {
            let pid = process["process"].as_u64().or(process["pid"].as_u64()).or(process["worker"].as_u64());
            let pid = pid.with_context(|| format!("no process in {process}"))?;
            let group = machine.check(&format!("sed -n 's/^0:://p' /proc/{pid}/cgroup"), LONG)?;
            let parent = format!("/system.slice/{unit}.service/");
            ensure!(
                group.starts_with(&parent) && !group.ends_with("/daemon"),
                "process {pid} of {unit} is in {group}"
            );
            let read = |file: &str| machine.check(&format!("cat /sys/fs/cgroup{group}/{file}"), LONG);
            ensure!(read("pids.max")? == tasks, "{group} has pids.max {}", read("pids.max")?);
            ensure!(read("memory.oom.group")? == "1", "{group} does not end as a whole");
            let memory = read("memory.max")?;
            ensure!((memory == "max") == (unit == "vhost-rgpu"), "{group} has memory.max {memory}");
            let user = machine.check(&format!("stat -c %u /proc/{pid}"), LONG)?;
            let name = if daemon == "server" { "worker" } else { "device process" };
            let line = doctor.lines().find(|line| line.contains(&format!("{name} {pid} (")));
            let line = line.with_context(|| format!("the doctor does not show {name} {pid}: {doctor}"))?;
            let says = format!("user {user}, its own mnt, pid, ipc, net namespaces");
            ensure!(line.contains(&says), "the doctor says of a process of user {user}: {line}");
            ensure!(user.parse::<u32>()? >= 1 << 30, "process {pid} of {unit} has user {user}");
            let seccomp = machine
                .check(&format!("grep -E '^(Seccomp|NoNewPrivs|CapEff):' /proc/{pid}/status"), LONG)?;
            let words: Vec<&str> = seccomp.split_whitespace().collect();
            ensure!(
                words == ["CapEff:", "0000000000000000", "NoNewPrivs:", "1", "Seccomp:", "2"],
                "process {pid}: {seccomp}"
            );
        }
    }
    held.finish(machine, "groups")
}

fn reload_and_restart(machine: &Machine) -> Result<()> {
    let pid = property(machine, "rgpu-server", "MainPID")?;
    let held = Held::start(machine, "reload")?;
    machine.check("systemctl reload rgpu-server", LONG)?;
    eventually(machine, "journalctl -b --no-pager -u rgpu-server | grep -q 'SIGHUP: read'")?;
    ensure!(property(machine, "rgpu-server", "MainPID")? == pid, "a reload started another process");
    held.finish(machine, "reload")?;

    // A stopped daemon leaves no process, and no cgroup.
    for unit in ["rgpu-server", "vhost-rgpu"] {
        let stop = if unit == "vhost-rgpu" { "vhost-rgpu.socket vhost-rgpu" } else { unit };
        machine.check(&format!("systemctl stop {stop}"), LONG)?;
        ensure!(property(machine, unit, "Result")? == "success", "{unit} did not stop cleanly");
        eventually(machine, &format!("test ! -e /sys/fs/cgroup/system.slice/{unit}.service"))
            .context("its cgroup is left")?;
    }
    // The socket starts the daemon, which waits for the server.
    machine.check("systemctl start rgpu-server vhost-rgpu.socket", LONG)?;
    ensure!(
        machine.run("systemctl is-active vhost-rgpu", LONG)?.text() == "inactive",
        "it should be inactive"
    );
    native(machine, "root", "vectorAdd")?;
    eventually(machine, "systemctl is-active vhost-rgpu")?;

    // The socket stays while the daemon restarts.
    let inode = "stat -c %i /run/rgpu/native.sock";
    let socket = machine.check(inode, LONG)?;
    machine.check("systemctl restart vhost-rgpu rgpu-server && rgpuctl status", LONG)?;
    ensure!(machine.check(inode, LONG)? == socket, "the restart replaced the socket");
    native(machine, "root", "vectorAdd")?;
    quiet(machine)?;

    // A daemon that is killed is restarted, without its processes' sessions.
    for unit in ["rgpu-server", "vhost-rgpu"] {
        let pid = property(machine, unit, "MainPID")?;
        machine.check(&format!("kill -9 {pid}"), LONG)?;
        eventually(
            machine,
            &format!(
                "systemctl is-active -q {unit} && test $(systemctl show --value -p MainPID {unit}) != {pid}"
            ),
        )?;
    }
    native(machine, "root", "vectorAdd")?;
    // The kill may be the only warning so far.
    machine.check("sleep 2; journalctl --rotate; journalctl --vacuum-time=1s", LONG)?;
    Ok(())
}

/// Who may use the native socket is changed as docs/slurm.md and docs/containers.md say.
fn socket_for_all(machine: &Machine) -> Result<()> {
    let is = |wanted: &str| -> Result<()> {
        let socket = machine.check("stat -c '%a %G' /run/rgpu/native.sock", LONG)?;
        ensure!(socket == wanted, "the socket is {socket}");
        Ok(())
    };
    let folder = "/etc/systemd/system/vhost-rgpu.socket.d";
    machine.check(
        &format!("mkdir {folder} && printf '[Socket]\\nSocketMode=0666\\n' > {folder}/mode.conf"),
        LONG,
    )?;
    machine.check("systemctl daemon-reload && systemctl restart vhost-rgpu.socket", LONG)?;
    is("666 rgpu")?;
    machine.check("useradd --no-create-home other", LONG)?;
    native(machine, "other", "vectorAdd")?;
    // It may have begun only with this program.
    eventually(machine, "systemctl is-active vhost-rgpu")?;
    machine.check(&format!("userdel other; rm -r {folder}; systemctl daemon-reload"), LONG)?;
    // The daemon never runs without the socket.
    machine.check("systemctl stop vhost-rgpu.socket && ! systemctl is-active vhost-rgpu", LONG)?;
    machine.check("systemctl start vhost-rgpu && systemctl is-active vhost-rgpu.socket", LONG)?;
    is("660 rgpu")?;
    native(machine, "root", "vectorAdd")?;
    quiet(machine)
}

/// Daemons that cannot start are started again until they can. Here a file is missing for a while.
fn failure(machine: &Machine) -> Result<()> {
    // As the example of the file says.
    machine.check(
        "sed -i 's|^#: \\(folder = \"/var/lib/rgpu/swap\"\\)|\\1|' /etc/rgpu/rgpu-server.toml",
        LONG,
    )?;
    machine.check("grep '^folder = \"/var/lib/rgpu/swap\"' /etc/rgpu/rgpu-server.toml", LONG)?;
    for unit in ["rgpu-server", "vhost-rgpu"] {
        let file = format!("/etc/rgpu/{unit}.toml");
        machine.check(&format!("mv {file} {file}.away; systemctl stop {unit}"), LONG)?;
        machine.check(&format!("systemctl start --no-block {unit}"), LONG)?;
        eventually(machine, &format!("test $(systemctl show --value -p NRestarts {unit}) -ge 7"))?;
        let told = format!("{unit} does not start: its unit is .*; it last said: {unit}: cannot read {file}");
        eventually(machine, &format!("rgpuctl doctor | grep '{told}'"))?;
        if unit == "vhost-rgpu" {
            // Its socket accepts connections all the same.
            let told = "native.sock: systemd has programs on this host wait there for vhost-rgpu, which does not start";
            eventually(machine, &format!("rgpuctl doctor | grep '{told}'"))?;
        }
        machine.check(&format!("mv {file}.away {file}"), LONG)?;
        eventually(machine, &format!("systemctl is-active -q {unit}"))?;
    }
    native(machine, "root", "vectorAdd")?;
    machine.check(
        "sed -i 's|^folder = \"/var/lib/rgpu/swap\"|#: &|' /etc/rgpu/rgpu-server.toml; systemctl restart rgpu-server",
        LONG,
    )?;
    // The failed starts may be the only warnings so far.
    machine.check("sleep 2; journalctl --rotate; journalctl --vacuum-time=1s", LONG)?;
    Ok(())
}

/// Once a guest's package is removed, programs do not find rgpu's libraries any more.
fn guest(machine: &Machine) -> Result<()> {
    let finds = |machine: &Machine| machine.check("ldconfig -p | grep -c /usr/lib/rgpu/; true", LONG);
    // apt removes rgpu-server for it.
    machine.check("apt-get install -y --no-install-recommends /mnt/guest/rgpu-guest.deb", LONG)?;
    ensure!(finds(machine)? != "0", "programs do not find rgpu's libraries");
    machine.check("apt-get remove -y rgpu-guest", LONG)?;
    ensure!(finds(machine)? == "0", "programs still find rgpu's libraries");
    machine.check("apt-get purge -y rgpu-guest", LONG).map(drop)
}

/// A program's session continues while the keeper of its device process is reloaded, and while systemd
/// restarts one that was killed. New sessions can begin, and a reload adds a guest.
fn keeper(machine: &Machine) -> Result<()> {
    let held = Held::start(machine, "keeper")?;
    machine.check(
        "printf '\n[[vm]]\nname = \"guest2\"\nsocket = \"/run/rgpu/vm-guest2.sock\"\ngroup = \"rgpu\"\n\
         server = \"tcp:127.0.0.1\"\n' >> /etc/rgpu/vhost-rgpu.toml",
        LONG,
    )?;
    let processes = |machine: &Machine| -> Result<Vec<serde_json::Value>> {
        let status = status(machine, "vhost-rgpu")?;
        let all = status["device_processes"].as_array().cloned().unwrap_or_default();
        Ok(all.iter().map(|process| process["process"].clone()).collect())
    };
    for kill in [false, true, true] {
        let before = processes(machine)?;
        ensure!(!before.is_empty(), "no device process serves the program");
        let pid = property(machine, "vhost-rgpu", "MainPID")?;
        if kill {
            machine.check(&format!("kill -9 {pid}"), LONG)?;
            let another =
                "systemctl is-active -q vhost-rgpu && test $(systemctl show --value -p MainPID vhost-rgpu)";
            eventually(machine, &format!("{another} != {pid}"))?;
        } else {
            machine.check("systemctl reload vhost-rgpu", LONG)?;
        }
        let deadline = std::time::Instant::now() + LONG;
        let replaced = |now: &Vec<_>| !now.is_empty() && now.iter().all(|one| !before.contains(one));
        while !processes(machine).as_ref().is_ok_and(replaced) {
            ensure!(std::time::Instant::now() < deadline, "the device processes are still {before:?}");
        }
        if !kill {
            ensure!(property(machine, "vhost-rgpu", "MainPID")? == pid, "a reload started another process");
        }
        let socket = machine.check("stat -c '%a %G' /run/rgpu/vm-guest2.sock", LONG)?;
        ensure!(socket == "660 rgpu", "the socket of guest2 is {socket}");
        native(machine, "root", "vectorAdd")?;
    }
    // A configuration that the next keeper could not serve, because the unit may not write there.
    let section = "[[vm]]\\nname = \"other\"\\nsocket = \"/usr/other.sock\"\\nserver = \"unix:/x\"\\n";
    let file = "/etc/rgpu/vhost-rgpu.toml";
    machine.check(&format!("cp -p {file} /root/kept && printf '{section}' >>{file}"), LONG)?;
    machine.check("! systemctl reload vhost-rgpu && systemctl is-active -q vhost-rgpu", LONG)?;
    machine.check(&format!("mv /root/kept {file}"), LONG)?;
    ensure!(status(machine, "vhost-rgpu")?["sessions_lost"] == 0, "sessions were lost");
    held.finish(machine, "keeper")?;
    // The kills may be the only warnings so far.
    machine.check("sleep 2; journalctl --rotate; journalctl --vacuum-time=1s", LONG)?;
    Ok(())
}

/// From systemd 254 on, the service manager keeps the descriptors of a killed daemon and passes them to the
/// next one, so sessions continue.
fn killed(machine: &Machine) -> Result<()> {
    let held = Held::start(machine, "killed")?;
    let worker = |machine: &Machine| -> Result<serde_json::Value> {
        // That of a program that has ended may still be listed.
        let status = status_once(machine, "server", |status| count(status, "sessions") == 1)?;
        Ok(status["sessions"][0]["worker"].clone())
    };
    let before = worker(machine)?;
    for _ in 0..2 {
        let pid = property(machine, "rgpu-server", "MainPID")?;
        machine.check(&format!("kill -9 {pid}"), LONG)?;
        eventually(
            machine,
            &format!(
                "systemctl is-active -q rgpu-server && test $(systemctl show --value -p MainPID rgpu-server) != {pid}"
            ),
        )?;
        ensure!(worker(machine)? == before, "the session has another worker");
        native(machine, "root", "vectorAdd")?;
    }
    held.finish(machine, "killed")?;
    // The kills may be the only warnings so far.
    machine.check("sleep 2; journalctl --rotate; journalctl --vacuum-time=1s", LONG)?;
    Ok(())
}

fn upgrade(machine: &Machine) -> Result<()> {
    let pids = |machine: &Machine| -> Result<[String; 2]> {
        Ok([property(machine, "rgpu-server", "MainPID")?, property(machine, "vhost-rgpu", "MainPID")?])
    };
    let before = pids(machine)?;
    let held = Held::start(machine, "upgrade")?;
    machine.check("dpkg -i /mnt/slurm/rgpu-slurm.deb", LONG)?;
    let timer = |state: &str, what: &str| -> Result<()> {
        let now = property(machine, TIMER, "ActiveState")?;
        ensure!(now == state, "{TIMER} is {now} {what}");
        Ok(())
    };
    timer("active", "after its installation")?;
    ensure!(property(machine, TIMER, "UnitFileState")? == "enabled", "{TIMER} is not enabled");
    machine.check(&format!("systemctl stop {TIMER}"), LONG)?;
    // Not without the others.
    let alone = machine.run("apt-get install -s --no-install-recommends /mnt/newer/rgpu-slurm.deb", LONG)?;
    ensure!(!alone.success() && alone.to_string().contains("rgpuctl (>= "), "{alone}");
    let said = machine.check("apt-get install -y --no-install-recommends /mnt/newer/*.deb", LONG)?;
    for text in ["rgpu-server keeps running", "vhost-rgpu keeps running"] {
        ensure!(said.contains(text), "the upgrade does not say {text:?}: {said}");
    }
    let version = machine.check("dpkg-query -W -f '${Version}' rgpu-server", LONG)?;
    ensure!(version.ends_with(".1"), "the version is {version}");
    ensure!(pids(machine)? == before, "the upgrade has restarted a daemon");
    timer("inactive", "after its operator has stopped it")?;
    // The operator's change of the configuration is still there.
    machine.check("grep -q '^server = \"tcp:127.0.0.1\"' /etc/rgpu/vhost-rgpu.toml", LONG)?;
    // Sessions continue, and others begin.
    native(machine, "root", "vectorAdd")?;
    // The new server takes the sessions over.
    machine.check("rgpuctl upgrade", LONG)?;
    native(machine, "root", "vectorAdd")?;
    held.finish(machine, "upgrade")?;
    machine.check("systemctl restart rgpu-server vhost-rgpu", LONG)?;
    let now = pids(machine)?;
    ensure!(now[0] != before[0] && now[1] != before[1], "the restart has not restarted the daemons");
    native(machine, "root", "vectorAdd")?;
    // A unit that its operator has disabled stays disabled.
    let disable = format!("systemctl disable rgpu-server {TIMER}");
    machine.check(
        &format!("{disable}; dpkg -i /mnt/packages/rgpu-server.deb /mnt/slurm/rgpu-slurm.deb"),
        LONG,
    )?;
    for unit in ["rgpu-server", TIMER] {
        ensure!(property(machine, unit, "UnitFileState")? == "disabled", "{unit} is enabled again");
    }
    // One that its operator has stopped stays so over an upgrade, but not if the package was removed first.
    machine.check("systemctl enable rgpu-server; systemctl stop rgpu-server", LONG)?;
    machine.check("dpkg -i /mnt/packages/rgpu-server.deb", LONG)?;
    ensure!(property(machine, "rgpu-server", "ActiveState")? == "inactive", "the upgrade has started it");
    machine.check(&format!("systemctl enable --now {TIMER}"), LONG)?;
    machine.check(&format!("apt-get remove -y rgpu-server vhost-rgpu {SLURM}"), LONG)?;
    timer("inactive", "although its package is removed")?;
    let again = ["packages/rgpu-server", "packages/vhost-rgpu", "slurm/rgpu-slurm"];
    machine.check(&format!("dpkg -i {}", again.map(|name| format!("/mnt/{name}.deb")).join(" ")), LONG)?;
    for unit in ["rgpu-server", "vhost-rgpu.socket", TIMER] {
        ensure!(property(machine, unit, "ActiveState")? == "active", "{unit} is not started");
    }
    // A job's lease, which a purge takes along. Its file is still empty, so the timer leaves it alone.
    machine.check("mkdir -p /run/rgpu-slurm; touch /run/rgpu-slurm/1.n1", LONG)?;
    quiet(machine)?;
    machine.check_console()
}

/// A worker that exceeds its memory limit ends without affecting others.
fn limits(machine: &Machine) -> Result<()> {
    machine.check(
        "printf '[sandbox]\\nmemory = \"100M\"\\ntasks = 64\\ncpu_percent = 150\\n' > /tmp/limits; \
         sed -i -e '/^\\[sandbox\\]/{r /tmp/limits' -e 'd}' /etc/rgpu/rgpu-server.toml && systemctl restart rgpu-server",
        LONG,
    )?;
    native(machine, "root", "vectorAdd")?;
    let held = Held::start(machine, "limits")?;
    let pid = property(machine, "rgpu-server", "MainPID")?;
    // Those of programs that have ended go away meanwhile, and new ones get their limits.
    let limits = "cd /sys/fs/cgroup/system.slice/rgpu-server.service && for g in worker*; do echo $(cat $g/memory.max $g/pids.max $g/cpu.max); done | sort -u";
    eventually(machine, &format!("test \"$({limits})\" = '104857600 64 150000 100000'"))
        .with_context(|| format!("the workers' limits are {:?}", machine.check(limits, LONG)))?;
    // It copies 128 MiB to its device, which uses the worker's memory.
    let greedy = machine.run(&format!("LD_LIBRARY_PATH=/usr/lib/rgpu {PROGRAMS}/vectorAdd --full"), LONG)?;
    ensure!(!greedy.success(), "a worker used more memory than allowed: {greedy}");
    eventually(
        machine,
        "journalctl -b --no-pager -u rgpu-server | grep -i 'session lost' | grep -qi memory",
    )?;
    ensure!(property(machine, "rgpu-server", "MainPID")? == pid, "the daemon ended with its worker");
    held.finish(machine, "limits")?;
    native(machine, "root", "vectorAdd")
}
