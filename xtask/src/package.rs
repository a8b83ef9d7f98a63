//! `cargo xtask package`: builds Debian packages in `target/packages/` from the tree of `cargo xtask dist`.
//!
//! The table in this file lists the files of each package. `packaging/` has what only Debian needs:
//! descriptions and maintainer scripts. dpkg-deb makes the packages, and lintian must find no error in them.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use rgpu_tests::tree::{self, Build};
use serde_json::Value;

use crate::progress::Step;
use crate::{debian, dependencies, dist, licenses, process, sbom};

/// Build Debian packages (target/packages).
#[derive(Args)]
pub struct Arguments {
    /// Debian revision of the packages: higher for packages that are made again from the same version
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    revision: u32,
    /// Build without optimization, which is quicker, to try the packages
    #[arg(long)]
    debug: bool,
}

/// The packages' maintainer.
const MAINTAINER: &str = "rgpu developers <rgpu@rgpu.dev>";
/// Libraries that programs may need, all in the packages that each `control` names.
const LIBRARIES: [&str; 4] = ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"];
/// lintian's complaints about every package that do not apply here.
const SUPPRESSED: &str = "initial-upload-closes-no-bugs";

struct Package {
    name: &'static str,
    /// Path in the tree of `cargo xtask dist`, and the folder below `/` that it goes to.
    files: &'static [(&'static str, &'static str)],
    /// Crates whose dependencies' licenses it contains.
    crates: &'static [&'static str],
    /// Its license.
    license: &'static str,
}

const APACHE: &str = "Apache-2.0";

const PACKAGES: &[Package] = &[
    Package {
        name: "rgpu-server",
        files: &[
            ("bin/rgpu-server", "usr/bin"),
            ("share/rgpu/rgpu-server.toml", "etc/rgpu"),
            ("share/rgpu/clients.toml", "usr/share/doc/rgpu-server/examples"),
            ("share/rgpu/systemd/rgpu-server.service", "usr/lib/systemd/system"),
            ("share/rgpu/systemd/rgpu-server-generator", "usr/lib/systemd/system-generators"),
            ("share/man/man8/rgpu-server*", "usr/share/man/man8"),
            ("share/bash-completion/completions/rgpu-server", "usr/share/bash-completion/completions"),
            ("share/zsh/vendor-completions/_rgpu-server", "usr/share/zsh/vendor-completions"),
            ("share/fish/vendor_completions.d/rgpu-server.fish", "usr/share/fish/vendor_completions.d"),
        ],
        crates: &["rgpu-server"],
        license: APACHE,
    },
    Package {
        name: "vhost-rgpu",
        files: &[
            ("bin/vhost-rgpu", "usr/bin"),
            ("share/rgpu/vhost-rgpu.toml", "etc/rgpu"),
            ("share/rgpu/qemu-configs/*", "usr/share/doc/vhost-rgpu/examples"),
            ("share/rgpu/systemd/vhost-rgpu.*", "usr/lib/systemd/system"),
            ("share/rgpu/systemd/rgpu.conf", "usr/lib/sysusers.d"),
            ("share/man/man8/vhost-rgpu*", "usr/share/man/man8"),
            ("share/bash-completion/completions/vhost-rgpu", "usr/share/bash-completion/completions"),
            ("share/zsh/vendor-completions/_vhost-rgpu", "usr/share/zsh/vendor-completions"),
            ("share/fish/vendor_completions.d/vhost-rgpu.fish", "usr/share/fish/vendor_completions.d"),
        ],
        crates: &["vhost-rgpu"],
        license: APACHE,
    },
    Package {
        name: "rgpuctl",
        files: &[
            ("bin/rgpuctl", "usr/bin"),
            ("share/rgpu/monitoring/rgpu-alerts.yml", "usr/share/rgpu/monitoring"),
            ("share/rgpu/monitoring/rgpu-dashboard.json", "usr/share/rgpu/monitoring"),
            ("share/man/man1/rgpuctl*", "usr/share/man/man1"),
            ("share/bash-completion/completions/rgpuctl", "usr/share/bash-completion/completions"),
            ("share/zsh/vendor-completions/_rgpuctl", "usr/share/zsh/vendor-completions"),
            ("share/fish/vendor_completions.d/rgpuctl.fish", "usr/share/fish/vendor_completions.d"),
        ],
        crates: &["rgpuctl"],
        license: APACHE,
    },
    Package {
        name: "rgpu-libs",
        files: &[("lib/rgpu/*", "usr/lib/rgpu")],
        crates: &["rgpu-cuda", "rgpu-cudart", "rgpu-nvml", "rgpu-cupti"],
        license: APACHE,
    },
    // All of its files are in packaging/.
    Package { name: "rgpu-slurm", files: &[], crates: &[], license: APACHE },
    Package {
        name: "rgpu-guest",
        files: &[("share/rgpu/guest-driver/udev/60-virtio-rgpu.rules", "usr/lib/udev/rules.d")],
        crates: &[],
        license: APACHE,
    },
    Package {
        name: "rgpu-guest-dkms",
        files: &[
            ("share/rgpu/guest-driver/Kbuild", "usr/src/virtio-rgpu-@UPSTREAM@"),
            ("share/rgpu/guest-driver/Makefile", "usr/src/virtio-rgpu-@UPSTREAM@"),
            ("share/rgpu/guest-driver/dkms.conf", "usr/src/virtio-rgpu-@UPSTREAM@"),
            ("share/rgpu/guest-driver/src/*", "usr/src/virtio-rgpu-@UPSTREAM@/src"),
            (
                "share/rgpu/guest-driver/include/uapi/linux/*",
                "usr/src/virtio-rgpu-@UPSTREAM@/include/uapi/linux",
            ),
        ],
        crates: &[],
        license: "GPL-2",
    },
];

/// The folder of the packages that `cargo xtask package` makes.
pub fn folder() -> PathBuf {
    tree::target().join("packages")
}

/// The file of a package that has been built in a folder.
pub fn built(folder: &Path, name: &str) -> Result<PathBuf> {
    matching(folder, &format!("{name}_*"))?.pop().with_context(|| format!("there is no package {name}"))
}

/// Builds and checks the packages.
pub fn package(arguments: &Arguments) -> Result<()> {
    let (build, compression) = match arguments.debug {
        true => (Build::Debug, QUICK),
        false => (Build::Release, SMALL),
    };
    make(&folder(), build, arguments.revision, compression)
}

/// Compression of packages that are published: dpkg-deb's method and level.
const SMALL: Compression = ("xz", "6");
/// Compression of packages that are built only for a trial.
pub const QUICK: Compression = ("gzip", "1");

type Compression = (&'static str, &'static str);

/// Installs what makes packages.
pub fn tools() -> Result<()> {
    debian::packages(&["binutils", "lintian"], "making Debian packages")
}

/// Builds and checks the packages of a build, with a Debian revision. They replace what is in `folder`.
pub fn make(folder: &Path, build: Build, revision: u32, compression: Compression) -> Result<()> {
    tools()?;
    // dpkg-deb refuses folders that not everybody may enter.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
    dist::dist_of(build)?;
    let log = process::log("package")?;
    let step = Step::spinner("making Debian packages");
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let version = Version {
        upstream: env!("CARGO_PKG_VERSION").to_owned(),
        full: format!("{}-{}", env!("CARGO_PKG_VERSION"), revision),
        time: time_of_sources(),
        compression,
        metadata: dependencies::metadata()?,
    };
    let mut made = Vec::new();
    for package in PACKAGES {
        step.note(package.name);
        made.push(package.make(&version, folder, &log)?);
    }
    step.note("lintian");
    let mut lintian = Command::new("lintian");
    lintian.args(["--fail-on", "error", "--suppress-tags", SUPPRESSED]).args(&made);
    // lintian warns if root runs it, as in a container.
    process::run(lintian.arg("--allow-root"), &log)?;
    step.done(&format!("{} in {}", made.len(), folder.display()));
    Ok(())
}

/// The packages to make.
struct Version {
    /// The version of the sources.
    upstream: String,
    /// That version with Debian's revision.
    full: String,
    /// When the sources were last changed, in seconds since 1970. It becomes the packages' date, so that the
    /// same sources make the same packages.
    time: String,
    compression: Compression,
    /// What Cargo knows about all crates.
    metadata: Value,
}

/// The time of the last commit, or now.
fn time_of_sources() -> String {
    let mut git = Command::new("git");
    let commit = process::output(git.args(["log", "-1", "--format=%ct"]).current_dir(tree::root()));
    let time = std::env::var("SOURCE_DATE_EPOCH").ok().or(commit.ok()).map(|time| time.trim().to_owned());
    let now = || std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs().to_string();
    time.filter(|time| time.parse::<u64>().is_ok()).unwrap_or_else(now)
}

impl Version {
    /// Text of `packaging/` with the versions filled in.
    fn fill(&self, text: &str) -> String {
        text.replace("@VERSION@", &self.full).replace("@UPSTREAM@", &self.upstream)
    }
}

impl Package {
    /// Makes the package in `folder`. Returns its path.
    fn make(&self, version: &Version, folder: &Path, log: &Path) -> Result<PathBuf> {
        let root = folder.join(self.name);
        let own = tree::root().join("packaging").join(self.name);
        for (pattern, place) in self.files {
            let place = root.join(version.fill(place));
            fs::create_dir_all(&place).with_context(|| format!("cannot create {}", place.display()))?;
            for file in matching(&dist::folder(), pattern)? {
                copy(&file, &place.join(file.file_name().unwrap_or_default()))?;
            }
        }
        if own.join("files").is_dir() {
            copy_tree(&own.join("files"), &root)?;
        }
        let config = root.join(format!("usr/src/virtio-rgpu-{}/dkms.conf", version.upstream));
        if config.exists() {
            let text = read(&config)?;
            let line = text.lines().find(|line| line.starts_with("PACKAGE_VERSION="));
            let line = line.with_context(|| format!("{} has no version", config.display()))?;
            write(&config, &text.replace(line, &format!("PACKAGE_VERSION=\"{}\"", version.upstream)), 0o644)?;
        }
        self.documents(&root, version, &own)?;
        for page in below(&root.join("usr/share/man"))? {
            process::run(Command::new("gzip").args(["-9n"]).arg(&page), log)?;
        }
        for program in below(&root)? {
            check_libraries(&program)?;
        }
        self.control(&root, version, &own)?;

        let architecture =
            if read(&own.join("control"))?.contains("Architecture: all") { "all" } else { "amd64" };
        let package = folder.join(format!("{}_{}_{architecture}.deb", self.name, version.full));
        let mut make = Command::new("dpkg-deb");
        let (method, level) = version.compression;
        make.arg("--root-owner-group").args(["-Z", method, "-z", level, "--build"]).arg(&root).arg(&package);
        process::run(make.env("SOURCE_DATE_EPOCH", &version.time), log)?;
        fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
        Ok(package)
    }

    /// Writes the copyright, the changelog and lintian's overrides.
    fn documents(&self, root: &Path, version: &Version, own: &Path) -> Result<()> {
        let folder = root.join("usr/share/doc").join(self.name);
        let copyright = format!(
            "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\
             Upstream-Name: rgpu\n\n\
             Files: *\n\
             Copyright: 2026 The rgpu developers\n\
             License: {license}\n \
             The full text is in /usr/share/common-licenses/{license}.{others}\n",
            license = self.license,
            others = if self.crates.is_empty() {
                ""
            } else {
                "\n The licenses of the libraries inside are in third-party.gz next to this file."
            },
        );
        write(&folder.join("copyright"), &copyright, 0o644)?;
        if !self.crates.is_empty() {
            let collected = tempfile::tempdir().context("cannot create a folder")?;
            let crates = dependencies::among(&version.metadata, self.crates);
            licenses::collect(&crates, collected.path())?;
            let mut text = String::new();
            for file in below(collected.path())? {
                let name = file.strip_prefix(collected.path())?.display();
                text += &format!("==== {name}\n\n{}\n", String::from_utf8_lossy(&fs::read(&file)?));
            }
            let (third_party, bill) = (folder.join("third-party"), folder.join("sbom.cdx.json"));
            write(&third_party, &text, 0o644)?;
            sbom::write(&crates, &bill)?;
            set_mode(&bill, 0o644)?;
            process::output(Command::new("gzip").arg("-9n").args([&third_party, &bill]))?;
        }
        let date =
            process::output(Command::new("date").args(["-R", "-u", "-d", &format!("@{}", version.time)]))?;
        let changelog = format!(
            "rgpu ({}) unstable; urgency=medium\n\n  * Built from the sources of this version.\n\n -- {MAINTAINER}  {}\n",
            version.full,
            date.trim()
        );
        let path = folder.join("changelog.Debian");
        write(&path, &changelog, 0o644)?;
        process::output(Command::new("gzip").arg("-9n").arg(&path))?;
        if own.join("lintian-overrides").is_file() {
            let text = read(&own.join("lintian-overrides"))?;
            write(&root.join("usr/share/lintian/overrides").join(self.name), &text, 0o644)?;
        }
        Ok(())
    }

    /// Writes the folder `DEBIAN`.
    fn control(&self, root: &Path, version: &Version, own: &Path) -> Result<()> {
        let files = below(root)?;
        let within = |file: &PathBuf| -> Result<String> {
            Ok(file.strip_prefix(root)?.to_str().context("a file's name is not UTF-8")?.to_owned())
        };
        let mut bytes = 0;
        let (mut sums, mut settings) = (String::new(), String::new());
        for file in &files {
            let name = within(file)?;
            let metadata = fs::symlink_metadata(file)?;
            bytes += metadata.len();
            // dpkg has sums of regular files only.
            if metadata.is_symlink() {
                continue;
            }
            if name.starts_with("etc/") {
                settings += &format!("/{name}\n");
            }
            let sum = process::output(Command::new("md5sum").arg("-b").arg(file))?;
            let sum = sum.split(' ').next().unwrap_or_default();
            sums += &format!("{sum}  {name}\n");
        }
        let folder = root.join("DEBIAN");
        let control = version.fill(&read(&own.join("control"))?);
        let (name, rest) = control.split_once('\n').context("a control file has several lines")?;
        ensure!(
            name == format!("Package: {}", self.name),
            "packaging/{} has the control of {name}",
            self.name
        );
        let control = format!(
            "{name}\nSource: rgpu\nVersion: {}\nMaintainer: {MAINTAINER}\nInstalled-Size: {}\n{rest}",
            version.full,
            bytes.div_ceil(1024)
        );
        write(&folder.join("control"), &control, 0o644)?;
        write(&folder.join("md5sums"), &sums, 0o644)?;
        if !settings.is_empty() {
            write(&folder.join("conffiles"), &settings, 0o644)?;
        }
        let scripts = ["preinst", "postinst", "prerm", "postrm"].map(|script| (script, 0o755));
        for (script, mode) in scripts.into_iter().chain([("triggers", 0o644)]) {
            if own.join(script).is_file() {
                write(&folder.join(script), &version.fill(&read(&own.join(script))?), mode)?;
            }
        }
        Ok(())
    }
}

/// The files that a path names, whose last component may end in `*`.
fn matching(root: &Path, pattern: &str) -> Result<Vec<PathBuf>> {
    let Some(prefix) = pattern.strip_suffix('*') else { return Ok(vec![root.join(pattern)]) };
    let (folder, begin) = prefix.rsplit_once('/').unwrap_or(("", prefix));
    let folder = root.join(folder);
    let context = || format!("cannot list {}", folder.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(&folder).with_context(context)? {
        let path = entry.with_context(context)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_file() && name.starts_with(begin) {
            found.push(path);
        }
    }
    ensure!(!found.is_empty(), "no file matches {pattern} in {}", root.display());
    Ok(found)
}

/// All files below a folder, sorted; none if it does not exist.
fn below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    if !folder.exists() {
        return Ok(files);
    }
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(below(&path)?);
        } else {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Fails if a program or library needs a shared library of a package that no `control` names.
fn check_libraries(file: &Path) -> Result<()> {
    if !fs::read(file).with_context(|| format!("cannot read {}", file.display()))?.starts_with(b"\x7fELF") {
        return Ok(());
    }
    let dynamic = process::output(Command::new("readelf").arg("-d").arg(file))?;
    for line in dynamic.lines().filter(|line| line.contains("(NEEDED)")) {
        let name = line.split(['[', ']']).nth(1).unwrap_or_default();
        if !LIBRARIES.contains(&name) {
            bail!("{} needs {name}: name its package in packaging/*/control", file.display());
        }
    }
    Ok(())
}

/// Copies a file; in a package only programs are executable. A link stays one: a second copy of a library
/// would be a second library in a process.
fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Ok(target) = fs::read_link(from) {
        return std::os::unix::fs::symlink(target, to)
            .with_context(|| format!("cannot make the link {}", to.display()));
    }
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    let programs = ["bin", "system-generators"];
    let program = to.components().any(|part| programs.iter().any(|name| part.as_os_str() == *name));
    set_mode(to, if program { 0o755 } else { 0o644 })
}

/// Copies what is in a folder into another one. The copies' modes do not depend on the umask under which the
/// originals were made: everybody can read them, and can execute what its owner can execute.
pub fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    if !to.exists() {
        fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
        set_mode(to, 0o755)?;
    }
    for entry in fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))? {
        let entry = entry?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() {
            copy_tree(&from, &to)?;
            continue;
        }
        let context = || format!("cannot copy {} to {}", from.display(), to.display());
        fs::copy(&from, &to).with_context(context)?;
        let executable = fs::metadata(&from).with_context(context)?.permissions().mode() & 0o100 != 0;
        set_mode(&to, if executable { 0o755 } else { 0o644 })?;
    }
    Ok(())
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, Permissions::from_mode(mode))
        .with_context(|| format!("cannot change the permissions of {}", path.display()))
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    let folder = path.parent().context("a file without a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    set_mode(path, mode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_only_their_owner_can_read_are_everybodys_in_a_package() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        write(&from.join("usr/lib/script"), "#!/bin/sh\n", 0o700).unwrap();
        write(&from.join("etc/settings"), "", 0o640).unwrap();
        for place in ["usr/lib", "usr", "etc", ""] {
            set_mode(&from.join(place), 0o700).unwrap();
        }
        // Of another file of the package.
        write(&to.join("etc/others"), "", 0o600).unwrap();
        copy_tree(&from, &to).unwrap();
        let mode = |place: &str| fs::metadata(to.join(place)).unwrap().permissions().mode() & 0o7777;
        let places = ["usr", "usr/lib", "usr/lib/script", "etc/settings", "etc/others"];
        assert_eq!(places.map(mode), [0o755, 0o755, 0o755, 0o644, 0o600]);
    }
}
