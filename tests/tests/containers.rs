//! Containers: a CDI specification of `rgpuctl cdi generate`, and real podman, as root and as another user.
//!
//! Everything runs in its own mount namespace, with configuration, images and users that the machine does not
//! see. A container holds a program and the C library, nothing else.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use rgpu_tests::guest::{Host, Options};
use rgpu_tests::{programs, tree};

/// A user that does not exist on this machine, the socket's group, and the first user ID in the user's
/// containers.
const USER: u32 = 54_321;
const GROUP: u32 = 54_322;
const SUBORDINATE: u32 = 5_432_100;

/// The engines' usual settings, but with as few rights as this machine may have: containers without their own
/// cgroups, networks and limits.
const SETTINGS: &str = r#"[containers]
cgroups = "disabled"
netns = "none"
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
apparmor_profile = ""
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
runtime = "crun"
"#;

/// Prepares the namespaces and then runs the rest of the arguments. `$1` is the test's folder, `$2` the
/// socket, `$3` the libraries' folder.
const PREPARE: &str = r#"set -e
umount -R /sys/fs/cgroup 2>/dev/null || true
mount -t cgroup2 none /sys/fs/cgroup
for file in passwd group subuid subgid; do mount --bind "$1/etc/$file" /etc/$file; done
mkdir -p /etc/cdi /var/lib/containers
for folder in /etc/cdi /var/lib/containers /run; do mount -t tmpfs -o mode=755 none $folder; done
# What programs and users reach, wherever it is.
mkdir -p /run/rgpu "$1/lib"
touch /run/rgpu/native.sock
mount --bind "$2" /run/rgpu/native.sock
mount --bind "$3" "$1/lib"
install -d -m 700 -o 54321 -g 54321 /run/user /run/user/54321
chmod 755 /run/user
rgpuctl cdi generate --libraries "$1/lib"
export CONTAINERS_CONF="$1/containers.conf" IMAGE="$1/image.tar"
shift 3
exec "$@"
"#;

/// The test's folder and the daemons.
struct Place {
    folder: tempfile::TempDir,
    host: Host,
}

impl Place {
    fn new() -> Result<Place> {
        ensure!(nix::unistd::geteuid().is_root(), "this test takes root: it makes namespaces and users");
        let host = Host::start("containers", Options::software("local"))?;
        let socket = host.native_socket();
        // The group rgpu owns it.
        nix::unistd::chown(&socket, None, Some(GROUP.into()))?;
        let folder = tempfile::Builder::new().prefix("rgpu-containers-").tempdir()?;
        let place = Place { folder, host };
        fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755))?;
        fs::create_dir(place.path("etc"))?;
        let with = |file: &str, line: String| {
            let before = fs::read_to_string(Path::new("/etc").join(file)).unwrap_or_default();
            fs::write(place.path("etc").join(file), format!("{before}\n{line}\n"))
        };
        let home = place.path("home");
        with("passwd", format!("rgpu-tester:x:{USER}:{USER}::{}:/bin/sh", home.display()))?;
        with("group", format!("rgpu-tester:x:{USER}:\nrgpu-testers:x:{GROUP}:rgpu-tester"))?;
        with("subuid", format!("rgpu-tester:{SUBORDINATE}:65536"))?;
        with("subgid", format!("rgpu-tester:{SUBORDINATE}:65536"))?;
        fs::create_dir(&home)?;
        fs::create_dir(place.path("home-of-root"))?;
        nix::unistd::chown(&home, Some(USER.into()), Some(USER.into()))?;
        fs::write(place.path("containers.conf"), SETTINGS)?;
        place.image()?;
        Ok(place)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes `image.tar`: the programs, and what this machine's loader finds for them and for rgpu's
    /// libraries.
    fn image(&self) -> Result<()> {
        let root = self.path("root");
        let mut needed: Vec<PathBuf> = Vec::new();
        let libraries = fs::read_dir(tree::guest_libraries())?.flatten().map(|entry| entry.path());
        let programs = ["vectorAdd", "idle", "nvidia_smi"].map(|name| tree::programs_static().join(name));
        for file in libraries.chain(programs.iter().cloned()) {
            let said = output(Command::new("ldd").arg(&file))?;
            needed.extend(said.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from));
        }
        let copies = programs
            .iter()
            .map(|program| (program.clone(), root.join("bin").join(program.file_name().unwrap_or_default())));
        for (from, to) in copies.chain(
            needed.iter().map(|file| (file.clone(), root.join(file.strip_prefix("/").unwrap_or(file)))),
        ) {
            // The libraries that a container gets are not in its image.
            if from.starts_with(tree::guest_libraries()) {
                continue;
            }
            fs::create_dir_all(to.parent().context("a file without a folder")?)?;
            fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        }
        output(Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(self.path("image.tar")).arg("."))?;
        Ok(())
    }

    /// A script in new namespaces, as root or as the other user. Everything it starts ends with it.
    fn script(&self, root: bool, script: &str) -> Command {
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", PREPARE, "sh"])
            .arg(self.folder.path())
            .arg(self.host.native_socket())
            .arg(tree::guest_libraries());
        let (home, run) = if root {
            (self.path("home-of-root"), "/run".to_owned())
        } else {
            command.args([
                "setpriv",
                &format!("--reuid={USER}"),
                &format!("--regid={USER}"),
                "--init-groups",
            ]);
            (self.path("home"), format!("/run/user/{USER}"))
        };
        let path = std::env::var("PATH").unwrap_or_default();
        command
            .args(["sh", "-c", script])
            .current_dir("/")
            .env("HOME", home)
            .env("XDG_RUNTIME_DIR", run)
            .env("STORAGE_DRIVER", "vfs")
            .env("PATH", format!("{}:{path}", tree::binaries().display()));
        command
    }

    /// `vhost-rgpu`'s device processes, by whom they serve.
    fn served(&self) -> Result<Vec<String>> {
        let status = self.host.bridge()?.status()?;
        let rows = status["device_processes"].as_array().context("no device processes")?;
        Ok(rows.iter().filter_map(|row| row["serves"].as_str()).map(str::to_owned).collect())
    }
}

fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().display().to_string();
    let output = command.output().with_context(|| format!("cannot run {program}"))?;
    let (said, complaints) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{program}: {}\n{said}\n{complaints}", output.status);
    Ok(said.into_owned())
}

/// The scripts' common part: `works` and `fails` print what they try, and run a container.
const SHELL: &str = r#"set -u
podman import -q "$IMAGE" tester >/dev/null || exit 1
run() { name=$1; shift; podman run --rm "$@" >"$HOME/said" 2>&1; }
works() { run "$@" && grep -q PASS "$HOME/said" || { echo "$1 failed:"; cat "$HOME/said"; exit 1; }; }
fails() {
    words=$1; shift
    run "$@" && { echo "$1 worked:"; cat "$HOME/said"; exit 1; }
    grep -q "$words" "$HOME/said" || { echo "$1 did not fail with $words:"; cat "$HOME/said"; exit 1; }
}
"#;

#[test]
fn root_runs_programs_in_containers() -> Result<()> {
    programs::built("vectorAdd")?;
    let place = Place::new()?;
    let script = format!(
        r#"{SHELL}
works "all GPUs" --device rgpu.dev/gpu=all tester vectorAdd
works "the first GPU" --device rgpu.dev/gpu=0 tester vectorAdd
works "a GPU of two, of which one is there" --device rgpu.dev/gpu=0 --device rgpu.dev/gpu=1 tester vectorAdd
works "NVML" --device rgpu.dev/gpu=all tester nvidia_smi
fails cudaErrorNoDevice "a GPU that is not there" --device rgpu.dev/gpu=7 tester vectorAdd
fails unresolvable "a name that is not there" --device rgpu.dev/gpu=99 tester vectorAdd
fails cudaErrorInsufficientDriver "no GPU" tester vectorAdd
fails "ermission denied" "another user" --user 1234 --device rgpu.dev/gpu=all tester vectorAdd
works "another user in the group" --user 1234 --group-add {GROUP} --device rgpu.dev/gpu=all tester vectorAdd
"#
    );
    output(&mut place.script(true, &script))?;
    place.host.settled()
}

#[test]
fn another_user_runs_programs_in_containers() -> Result<()> {
    programs::built("vectorAdd")?;
    let place = Place::new()?;
    let script = format!(
        r#"{SHELL}
fails "ermission denied" "a container without its user's groups" --device rgpu.dev/gpu=all tester vectorAdd
works "all GPUs" --group-add keep-groups --device rgpu.dev/gpu=all tester vectorAdd
works "the first GPU" --group-add keep-groups --device rgpu.dev/gpu=0 tester vectorAdd
"#
    );
    output(&mut place.script(false, &script))?;
    place.host.settled()
}

#[test]
fn a_container_counts_as_its_user() -> Result<()> {
    programs::built("idle")?;
    let place = Place::new()?;
    // Root in a user's container is the user. The container's other users are the user's subordinate IDs.
    for (options, owner) in [("", USER), ("--user 7", SUBORDINATE + 6)] {
        let script = format!(
            "{SHELL}exec podman run --rm -i {options} --group-add keep-groups --device rgpu.dev/gpu=all tester idle wait"
        );
        let mut command = place.script(false, &script);
        let mut podman = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut said = BufReader::new(podman.stdout.take().context("no output")?);
        let mut line = String::new();
        while !line.contains("IDLE") {
            line.clear();
            ensure!(said.read_line(&mut line)? > 0, "podman {options} has ended: {}", podman.wait()?);
        }
        let served = place.served()?;
        ensure!(served.contains(&format!("user {owner}")), "{owner} is not among {served:?}");
        drop(podman.stdin.take());
        let mut rest = String::new();
        said.read_to_string(&mut rest)?;
        ensure!(podman.wait()?.success() && rest.contains("PASS"), "podman {options}: {rest}");
    }
    place.host.settled()
}
