//! Follows `docs/quickstart-trial.md`, and the README's "Try it", each in a new Debian 12 with systemd: every
//! command, in the page's order, as a newcomer would. Prints how long each took. The page compiles everything
//! and boots a guest, which takes 15 to 20 minutes on two processors; the README runs all tests, too. So this
//! part runs only on request. [`slurm`] follows another page, with the packages that are built already, and
//! [`slurm_groups`] does what that page says on one machine that is emulated.
//!
//! The machine is a container of systemd-nspawn, at this machine's speed. It shares this machine's network
//! and its settings for reaching package registries. Two things are replaced, because not every machine
//! reaches where they come from: Rust is this machine's own, and the image that podman would pull is made of
//! the machine itself.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rgpu_tests::machine::setup;
use rgpu_tests::tree;

#[path = "newcomer/slurm.rs"]
mod slurm;
#[path = "newcomer/slurm_groups.rs"]
mod slurm_groups;

/// How long all commands may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(4 * 3600);

/// Where the machine has the source tree.
const SOURCES: &str = "root/rgpu";

/// Runs the commands and then powers the machine off.
const UNIT: &str = "[Unit]
Description=The commands of the page
After=network.target
SuccessAction=poweroff
FailureAction=poweroff

[Service]
Environment=HOME=/root
WorkingDirectory=/root/rgpu
ExecStart=/bin/bash /root/commands
StandardOutput=file:/root/transcript
StandardError=inherit

[Install]
WantedBy=multi-user.target
";

/// What podman cannot do in a container of this machine: cgroups and networks of its own.
const PODMAN: &str = "[containers]\ncgroups = \"disabled\"\nnetns = \"host\"\n";

/// A block of a page: its language, and its lines.
type Block<'a> = (&'a str, Vec<&'a str>);

fn blocks(page: &str) -> Vec<Block<'_>> {
    let mut found: Vec<Block> = Vec::new();
    let mut inside = false;
    for line in page.lines() {
        match line.strip_prefix("```") {
            Some(language) if !inside => found.push((language, Vec::new())),
            None if inside => found.last_mut().into_iter().for_each(|block| block.1.push(line)),
            _ => {}
        }
        inside ^= line.starts_with("```");
    }
    found
}

/// The lines of the page's blocks in this language.
fn lines_in<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    blocks(page).into_iter().filter(|block| block.0 == language).flat_map(|block| block.1).collect()
}

/// The part of a page below this heading, up to the next one.
fn section<'a>(page: &'a str, heading: &str) -> Option<&'a str> {
    let below = page.split_once(&format!("\n## {heading}\n"))?.1;
    Some(below.split("\n## ").next().unwrap_or(below))
}

/// The commands in lines of shell: a backslash continues a line, and a here-document belongs to its command.
fn commands(lines: &[&str]) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut open = String::new();
    let mut end: Option<&str> = None;
    for line in lines {
        open.push_str(line);
        match end {
            Some(word) if *line == word => end = None,
            Some(_) => {}
            None => end = line.split("<<").nth(1).and_then(|rest| rest.split_whitespace().next()),
        }
        if end.is_some() || line.ends_with('\\') {
            open.push('\n');
        } else if !open.trim().is_empty() {
            found.push(std::mem::take(&mut open));
        }
    }
    found
}

/// What runs in place of a command, if that is something else.
fn replaced(command: &str) -> Option<&'static str> {
    command.contains("sh.rustup.rs").then_some("export PATH=/opt/rust/bin:$PATH")
}

/// What the machine does after a command, unseen.
fn aside(command: &str) -> &'static str {
    match command.contains("install -y podman") {
        true => "podman import -q /opt/debian.tar docker.io/library/debian:12 >/dev/null",
        false => "true",
    }
}

/// A script that runs the commands and stops at the first that fails. Lines that begin with `@ ` say when
/// each began.
fn script(commands: &[String]) -> String {
    let mut text = String::from("tell() { printf '\\n@ %s %s\\n' \"$1\" \"$(date +%s.%N)\"; }\n");
    for (i, command) in commands.iter().enumerate() {
        let runs = replaced(command).unwrap_or(command);
        let aside = aside(command);
        text += &format!("tell {i}\n{runs}\n[ $? = 0 ] || {{ tell failed; exit 1; }}\ntell aside\n{aside}\n");
    }
    text + "tell end\n"
}

fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(output.status.success(), "{command:?}: {}\n{}", output.status, text(&output.stderr));
    Ok(text(&output.stdout))
}

/// Writes a file below a folder.
fn write(root: &Path, place: &str, text: &str) -> Result<()> {
    let path = root.join(place);
    fs::create_dir_all(path.parent().context("a file has a folder")?)?;
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// A Debian 12 in a folder, which reaches package registries as this machine does.
fn debian(root: &Path) -> Result<()> {
    if root.exists() {
        fs::remove_dir_all(root).with_context(|| format!("cannot remove {}", root.display()))?;
    }
    fs::create_dir_all(root).with_context(|| format!("cannot create {}", root.display()))?;
    let mut debootstrap = Command::new("debootstrap");
    debootstrap.args(["--include=systemd-sysv,dbus,ca-certificates", "bookworm"]).arg(root);
    run(debootstrap.args(setup::mirror()).env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C"))?;
    let write = |place: &str, text: &str| write(root, place, text);

    // What this machine needs to reach package registries, the new one needs, too.
    let main = setup::mirror().unwrap_or_else(|| "http://deb.debian.org/debian".into());
    let security = setup::mirror_labelled("Debian-Security")
        .unwrap_or_else(|| "http://security.debian.org/debian-security".into());
    write(
        "etc/apt/sources.list",
        &format!(
            "deb {main} bookworm main\ndeb {main} bookworm-updates main\ndeb {security} bookworm-security main\n"
        ),
    )?;
    write(setup::HOST_SETTINGS, &setup::host_settings()?)?;
    let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let settings = [
        ("/etc/resolv.conf".into(), "etc/resolv.conf"),
        ("/etc/pip.conf".into(), "etc/pip.conf"),
        (home.join(".cargo/config.toml"), "root/.cargo/config.toml"),
    ];
    for (from, to) in settings {
        if let Ok(text) = fs::read_to_string(&from) {
            write(to, &text)?;
        }
    }
    let certificates = fs::read_to_string("/etc/ssl/certs/ca-certificates.crt").unwrap_or_default();
    for (i, certificate) in certificates.split_inclusive("-----END CERTIFICATE-----").enumerate() {
        if let Some(at) = certificate.find("-----BEGIN") {
            let place = format!("usr/local/share/ca-certificates/host-{i}.crt");
            write(&place, &format!("{}\n", &certificate[at..]))?;
        }
    }
    run(Command::new("chroot").arg(root).arg("update-ca-certificates")).map(drop)
}

/// A Debian 12 in a folder, with the sources as they are in this tree.
fn machine(root: &Path) -> Result<()> {
    debian(root)?;
    let write = |place: &str, text: &str| write(root, place, text);
    let image = root.with_extension("tar");
    run(Command::new("tar").arg("-C").arg(root).arg("-cf").arg(&image).arg("."))?;
    fs::rename(&image, root.join("opt/debian.tar"))?;
    write("etc/containers/containers.conf", PODMAN)?;
    write("etc/hostname", "newcomer\n")?;
    write("etc/hosts", "127.0.0.1 localhost newcomer\n")?;
    fs::create_dir_all(root.join("opt/rust"))?;

    let sources = root.join(SOURCES);
    fs::create_dir_all(&sources)?;
    let copy = "git ls-files -z --cached --others --exclude-standard | tar -c --null --ignore-failed-read -T - | tar -x -C \"$0\"";
    run(Command::new("sh").arg("-c").arg(copy).arg(&sources).current_dir(tree::root()))?;

    write("etc/systemd/system/newcomer.service", UNIT)?;
    let wanted = root.join("etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wanted)?;
    std::os::unix::fs::symlink("../newcomer.service", wanted.join("newcomer.service"))?;
    Ok(())
}

/// A running machine, which is killed when this is dropped.
struct Running(Child);

impl Running {
    /// The machine's first process, once it runs. What sets the machine up is still in this one's namespaces.
    fn first(&self) -> Option<Pid> {
        let nspawn = self.0.id();
        let children = fs::read_to_string(format!("/proc/{nspawn}/task/{nspawn}/children")).ok()?;
        let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let mut inside = children
            .split_whitespace()
            .filter(|pid| namespace(pid).is_some_and(|its| Some(its) != namespace("self")));
        inside.next()?.parse().map(Pid::from_raw).ok()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It does not end with systemd-nspawn.
        if let Some(first) = self.first() {
            let _ = kill(first, Signal::SIGKILL);
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Boots the machine in this folder.
fn nspawn(root: &Path) -> Command {
    let mut nspawn = Command::new("systemd-nspawn");
    nspawn.args(["--quiet", "--boot", "--register=no", "--keep-unit", "--console=pipe", "--capability=all"]);
    nspawn.args(["--resolv-conf=off", "--timezone=off", "--system-call-filter=@known"]);
    nspawn.arg("-D").arg(root);
    nspawn
}

fn boot(root: &Path) -> Result<Running> {
    // This machine's Rust. It is not the rustup that chooses it, which would look for others.
    let rust = run(Command::new("rustc").args(["--print", "sysroot"]).current_dir(tree::root()))?;
    let mut nspawn = nspawn(root);
    nspawn.arg(format!("--bind-ro={}:/opt/rust", rust.trim()));
    if Path::new("/dev/fuse").exists() {
        nspawn.arg("--bind=/dev/fuse");
    }
    nspawn.env("SYSTEMD_NSPAWN_UNIFIED_HIERARCHY", "1").env("SYSTEMD_NSPAWN_API_VFS_WRITABLE", "yes");
    nspawn.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(Running(nspawn.spawn().with_context(|| format!("cannot start {nspawn:?}"))?))
}

/// A command's cell in a table of Markdown: its first line, without the comment behind it.
fn row(command: &str) -> String {
    let line = command.lines().next().unwrap_or_default();
    line.split("  #").next().unwrap_or_default().trim_end_matches([' ', '\\']).replace('|', "\\|")
}

/// A line that says when a command began: the command, and the seconds since 1970.
fn mark(line: &str) -> Option<(&str, f64)> {
    let (what, time) = line.strip_prefix("@ ")?.split_once(' ')?;
    Some((what, time.parse().ok()?))
}

/// Runs the commands of a page in a new machine of this name.
fn follow(name: &str, page: &str) -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), "this test takes root: it boots a machine");
    let commands = commands(&lines_in(page, "sh"));
    ensure!(!commands.is_empty(), "the page has no commands");
    let root = tree::target().join(name);
    machine(&root)?;
    fs::write(root.join("root/commands"), script(&commands))?;

    let begin = Instant::now();
    let mut running = boot(&root)?;
    let said = || fs::read(root.join("root/transcript")).unwrap_or_default();
    let mut shown = 0;
    loop {
        let ended = running.0.try_wait()?;
        let transcript = String::from_utf8_lossy(&said()).into_owned();
        let begun = transcript.lines().filter_map(mark).filter_map(|(what, _)| what.parse::<usize>().ok());
        for i in begun.skip(shown) {
            println!("{:5.0} s  $ {}", begin.elapsed().as_secs_f64(), commands[i]);
            shown = i + 1;
        }
        if ended.is_some() {
            break;
        }
        if begin.elapsed() > LIMIT {
            bail!("the commands have not ended: see {}", root.join("root/transcript").display());
        }
        std::thread::sleep(Duration::from_secs(1));
    }

    let transcript = String::from_utf8_lossy(&said()).into_owned();
    let marks: Vec<(&str, f64)> = transcript.lines().filter_map(mark).collect();
    let last: Vec<&str> = transcript.lines().rev().take(40).collect();
    let last = last.into_iter().rev().collect::<Vec<_>>().join("\n");
    ensure!(marks.last().is_some_and(|(what, _)| *what == "end"), "a command failed:\n{last}");
    println!("\n| command | seconds |\n|---|---|");
    for pair in marks.windows(2) {
        let ((what, from), (_, to)) = (pair[0], pair[1]);
        if let Ok(i) = what.parse::<usize>() {
            println!("| `{}` | {:.0} |", row(&commands[i]), to - from);
        }
    }
    // What the page shows was printed.
    for line in lines_in(page, "text") {
        for part in line.split('…').map(str::trim) {
            ensure!(transcript.contains(part), "the page shows {part:?}, which was not printed");
        }
    }
    fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))
}

/// A page of the source tree.
fn page(name: &str) -> Result<String> {
    let path = tree::root().join(name);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

#[test]
fn the_quick_start_on_one_machine_is_right_to_the_letter() -> Result<()> {
    follow("newcomer", &page("docs/quickstart-trial.md")?)
}

#[test]
fn the_readmes_commands_work_on_a_fresh_machine() -> Result<()> {
    let page = page("README.md")?;
    follow("newcomer-readme", section(&page, "Try it").context("the README has no such section")?)
}

#[test]
fn commands_are_taken_from_a_page_as_a_shell_would() {
    let page = "text\n```sh\na\nb \\\n  c\n\ncat > f <<END\nd\n\nEND\ne\n```\n```text\nf\n```\n";
    assert_eq!(commands(&lines_in(page, "sh")), ["a", "b \\\n  c", "cat > f <<END\nd\n\nEND", "e"]);
    assert_eq!(lines_in(page, "text"), ["f"]);
    assert_eq!(section("# a\n\n## b\nc\n## d\ne\n", "b"), Some("c"));
    assert_eq!(section("# a\n\n## b\nc\n", "c"), None);
    assert_eq!(row("a | b \\\n  c"), "a \\| b");
    assert_eq!(row("a      # why"), "a");
}
