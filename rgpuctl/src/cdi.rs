//! `rgpuctl cdi`: describes this machine's GPUs to container engines with the Container Device Interface
//! (CDI).
//!
//! A container gets rgpu's libraries, and access to a GPU: the guest's devices, or on a host the socket of
//! `vhost-rgpu`. There is no hook, so no program of rgpu touches a container's files before the container
//! runs.

use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::installation;

/// The file's version of the specification: the first one in which a device's name may begin with a digit.
/// Engines know all versions up to their own; podman 4.3 of Debian 12 knows 0.5.0.
const VERSION: &str = "0.5.0";
/// The kind of the devices, whose full names are `rgpu.dev/gpu=NAME`.
const KIND: &str = "rgpu.dev/gpu";
/// Where a container finds the libraries.
const LIBRARIES: &str = "/usr/lib/rgpu";
/// Where programs look for the socket of `vhost-rgpu`.
const SOCKET: &str = "/run/rgpu/native.sock";

/// Describe this machine's GPUs to container engines (Container Device Interface).
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Generate(Generate),
}

/// Write a CDI specification, so that containers get GPUs by name.
///
/// With --device rgpu.dev/gpu=all a container has all GPUs that this machine's programs have, with
/// rgpu.dev/gpu=0 only the first one. It also gets rgpu's CUDA libraries, first in LD_LIBRARY_PATH, and in a
/// guest the devices /dev/rgpu*, on a host the socket of vhost-rgpu. Write the specification again when
/// devices are added or removed.
#[derive(Args)]
#[command(after_long_help = "Examples:
  rgpuctl cdi generate                                    for all engines of this machine
  podman run --device rgpu.dev/gpu=all IMAGE PROGRAM      all GPUs
  podman run --device rgpu.dev/gpu=0 IMAGE PROGRAM        the first one

Files:
  /etc/cdi/rgpu.json         the specification; engines read all files of /etc/cdi")]
pub struct Generate {
    /// File to write, or - for standard output
    #[arg(long, value_name = "FILE", default_value = "/etc/cdi/rgpu.json")]
    output: PathBuf,
    /// Give containers this socket of vhost-rgpu instead of devices. By default /run/rgpu/native.sock, if
    /// there is no /dev/rgpu*
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Folder of rgpu's CUDA libraries. By default those that belong to this rgpuctl
    #[arg(long, value_name = "FOLDER")]
    libraries: Option<PathBuf>,
    /// Another folder in a container to search for libraries, because the image's LD_LIBRARY_PATH is
    /// replaced. May be given more than once. By default there is none
    #[arg(long, value_name = "FOLDER")]
    library_path: Vec<PathBuf>,
    /// Number of GPUs that get their own names, even if the server has fewer
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=32))]
    gpus: u32,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let Command::Generate(options) = &arguments.command;
    let way = match &options.socket {
        Some(socket) => Way::Socket(socket.clone()),
        None => Way::find(Path::new("/dev"), Path::new(SOCKET))?,
    };
    let libraries = match &options.libraries {
        Some(folder) => folder.clone(),
        None => installation::libraries()?,
    };
    ensure!(
        installation::has_libraries(&libraries),
        "there is no libcuda.so.1 in {}: install the package rgpu-libs, or say --libraries FOLDER",
        libraries.display()
    );
    let text = format!("{:#}\n", specification(&way, &libraries, &options.library_path, options.gpus)?);
    if options.output == Path::new("-") {
        print!("{text}");
    } else {
        write(&options.output, &text)?;
        println!(
            "{}: containers get GPUs with --device {KIND}=all, or with {KIND}=0 only the first one",
            options.output.display()
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// How a container reaches a GPU.
#[derive(Debug, PartialEq, Eq)]
enum Way {
    /// Devices of a guest.
    Devices(Vec<PathBuf>),
    /// The socket of `vhost-rgpu` for programs of this machine.
    Socket(PathBuf),
}

impl Way {
    /// The way that programs of this machine use.
    fn find(devices: &Path, socket: &Path) -> Result<Way> {
        let entries =
            std::fs::read_dir(devices).with_context(|| format!("cannot list {}", devices.display()))?;
        let is_device = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let number = name.strip_prefix("rgpu").unwrap_or_default();
            !number.is_empty()
                && number.bytes().all(|digit| digit.is_ascii_digit())
                && path.metadata().is_ok_and(|metadata| metadata.file_type().is_char_device())
        };
        let mut found: Vec<_> = entries.flatten().map(|entry| entry.path()).filter(is_device).collect();
        found.sort();
        if !found.is_empty() {
            return Ok(Way::Devices(found));
        }
        if socket.metadata().is_ok_and(|metadata| metadata.file_type().is_socket()) {
            return Ok(Way::Socket(socket.to_owned()));
        }
        bail!(
            "there is neither a device {}/rgpu0 nor the socket {}: in a guest load the driver (modprobe virtio_rgpu), on a host start vhost-rgpu, or say --socket PATH",
            devices.display(),
            socket.display()
        )
    }
}

/// The specification.
fn specification(way: &Way, libraries: &Path, library_path: &[PathBuf], gpus: u32) -> Result<Value> {
    // No mount needs to let a container change the machine's files.
    let mount = |from: &Path, to: &str| -> Result<Value> {
        let options = ["ro", "nosuid", "nodev", "bind"];
        Ok(json!({ "hostPath": absolute(from)?, "containerPath": to, "options": options }))
    };
    let mut mounts = vec![mount(libraries, LIBRARIES)?];
    let mut nodes = Vec::new();
    match way {
        Way::Devices(devices) => {
            for device in devices {
                nodes.push(json!({ "path": absolute(device)?, "permissions": "rw" }));
            }
        }
        Way::Socket(socket) => mounts.push(mount(socket, SOCKET)?),
    }
    let mut search = LIBRARIES.to_owned();
    for folder in library_path {
        let folder = absolute(folder)?;
        ensure!(!folder.contains(':'), "--library-path {folder}: a folder's name cannot contain a colon");
        search = format!("{search}:{folder}");
    }
    // A variable for each, because a container may have several and engines keep only one value of a
    // variable.
    let device =
        |name: &str, variable: &str| json!({ "name": name, "containerEdits": { "env": [variable] } });
    let mut devices = vec![device("all", "RGPU_GPU_ALL=1")];
    devices.extend((0..gpus).map(|gpu| device(&gpu.to_string(), &format!("RGPU_GPU_{gpu}=1"))));
    let mut edits = json!({ "env": [format!("LD_LIBRARY_PATH={search}")], "mounts": mounts });
    if !nodes.is_empty() {
        edits["deviceNodes"] = nodes.into();
    }
    Ok(json!({ "cdiVersion": VERSION, "kind": KIND, "devices": devices, "containerEdits": edits }))
}

/// The absolute path, as engines need it.
fn absolute(path: &Path) -> Result<String> {
    let full = std::path::absolute(path).with_context(|| format!("the path {}", path.display()))?;
    match full.into_os_string().into_string() {
        Ok(text) => Ok(text),
        Err(other) => bail!("{other:?} is not UTF-8, which a CDI specification has to be"),
    }
}

/// Writes the file atomically, so that no engine reads a part of it.
fn write(path: &Path, text: &str) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let context = || match nix::unistd::geteuid().is_root() {
        true => format!("cannot write {}", path.display()),
        false => format!("cannot write {} (as root it can be written, or say --output FILE)", path.display()),
    };
    let made: Vec<&Path> = folder.ancestors().take_while(|folder| !folder.exists()).collect();
    std::fs::create_dir_all(folder).with_context(context)?;
    // Whoever runs containers reads the file, whatever files of this user are usually like.
    for folder in made {
        let readable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(folder, readable).with_context(context)?;
    }
    // Engines only read files with names of specifications, so they ignore this one.
    let mut name = OsString::from(".");
    name.push(path.file_name().with_context(|| format!("{} is not a file's name", path.display()))?);
    name.push(".new");
    let new = folder.join(name);
    if let Err(e) = std::fs::remove_file(&new)
        && e.kind() != ErrorKind::NotFound
    {
        return Err(e).with_context(context);
    }
    let mut file = std::fs::File::create_new(&new).with_context(context)?;
    file.write_all(text.as_bytes()).with_context(context)?;
    file.set_permissions(std::fs::Permissions::from_mode(0o644)).with_context(context)?;
    std::fs::rename(&new, path).with_context(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(way: &Way, library_path: &[&str]) -> Value {
        let library_path: Vec<PathBuf> = library_path.iter().map(PathBuf::from).collect();
        specification(way, Path::new("/opt/rgpu/lib"), &library_path, 2).unwrap()
    }

    #[test]
    fn a_host_s_containers_get_the_socket_and_the_libraries() {
        let options = json!(["ro", "nosuid", "nodev", "bind"]);
        let expected = json!({
            "cdiVersion": "0.5.0",
            "kind": "rgpu.dev/gpu",
            "devices": [
                { "name": "all", "containerEdits": { "env": ["RGPU_GPU_ALL=1"] } },
                { "name": "0", "containerEdits": { "env": ["RGPU_GPU_0=1"] } },
                { "name": "1", "containerEdits": { "env": ["RGPU_GPU_1=1"] } },
            ],
            "containerEdits": {
                "env": ["LD_LIBRARY_PATH=/usr/lib/rgpu"],
                "mounts": [
                    { "hostPath": "/opt/rgpu/lib", "containerPath": "/usr/lib/rgpu", "options": options },
                    { "hostPath": "/x/native.sock", "containerPath": "/run/rgpu/native.sock", "options": options },
                ],
            },
        });
        assert_eq!(made(&Way::Socket("/x/native.sock".into()), &[]), expected);
    }

    #[test]
    fn a_guest_s_containers_get_its_devices() {
        let edits =
            made(&Way::Devices(vec!["/dev/rgpu0".into()]), &["/opt/a", "/opt/b"])["containerEdits"].take();
        assert_eq!(edits["deviceNodes"], json!([{ "path": "/dev/rgpu0", "permissions": "rw" }]));
        assert_eq!(edits["mounts"].as_array().map(Vec::len), Some(1));
        assert_eq!(edits["env"], json!(["LD_LIBRARY_PATH=/usr/lib/rgpu:/opt/a:/opt/b"]));
    }

    #[test]
    fn a_folder_with_a_colon_is_refused() {
        let wrong = specification(&Way::Devices(Vec::new()), Path::new("/a"), &["/b:c".into()], 1);
        assert!(wrong.unwrap_err().to_string().contains("colon"));
    }

    #[test]
    fn containers_get_devices_if_there_are_any_and_otherwise_the_socket() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("native.sock");
        // A regular file with a device's name is not a device.
        std::fs::write(folder.path().join("rgpu0"), "").unwrap();
        let missing = Way::find(folder.path(), &socket).unwrap_err().to_string();
        assert!(missing.contains("start vhost-rgpu"), "{missing}");
        let _listening = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert_eq!(Way::find(folder.path(), &socket).unwrap(), Way::Socket(socket.clone()));
        std::fs::remove_file(folder.path().join("rgpu0")).unwrap();
        for (name, device) in [("rgpu10", true), ("rgpu2", true), ("rgpu", false), ("rgpu1x", false)] {
            std::os::unix::fs::symlink("/dev/null", folder.path().join(name)).unwrap();
            let Ok(Way::Devices(found)) = Way::find(folder.path(), &socket) else { panic!("no device") };
            assert_eq!(found.contains(&folder.path().join(name)), device, "{name}");
        }
    }

    #[test]
    fn a_file_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cdi/rgpu.json");
        for text in ["one", "another"] {
            write(&path, text).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
