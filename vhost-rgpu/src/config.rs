//! Configuration: a TOML file, or flags for one machine, into what the daemon serves. Every complaint names the file's line and the key.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use host_bridge::bridge::{SessionConfig, TransportKind};
use host_bridge::framing::Address;
use host_bridge::verbs::{Settings, VerbsError};
use protocol::device::MAX_EXTENTS;
use serde::Deserialize;
use thiserror::Error;
use toml::Spanned;

/// What to serve.
#[derive(Debug, Clone)]
pub struct Config {
    /// Filter of the log, in the manner of `RUST_LOG`.
    pub log: String,
    /// Virtual machines.
    pub vms: Vec<Vm>,
    /// Processes of this host.
    pub native: Option<Native>,
    /// Where the status is told.
    pub status: Option<PathBuf>,
}

/// One virtual machine.
#[derive(Debug, Clone)]
pub struct Vm {
    /// Its name, for people and for the server.
    pub name: String,
    /// vhost-user socket that its VMM connects to.
    pub socket: PathBuf,
    /// How its sessions are opened.
    pub session: SessionConfig,
    /// What its guest may take.
    pub limits: Limits,
}

/// The socket for processes of this host.
#[derive(Debug, Clone)]
pub struct Native {
    /// The socket.
    pub socket: PathBuf,
    /// Permissions of the socket's file.
    pub mode: u32,
    /// How sessions are opened.
    pub session: SessionConfig,
    /// What all clients together (channels) and each (sizes) may take.
    pub limits: Limits,
}

/// What a guest, or a native client, may take. Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Channels at one time.
    pub max_channels: u32,
    /// Extents in one request.
    pub max_extents: u32,
    /// One channel.
    pub max_channel_size: u64,
    /// Memory that one channel has registered; 0: no limit.
    pub max_registered: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { max_channels: 256, max_extents: MAX_EXTENTS, max_channel_size: 256 << 20, max_registered: 0 }
    }
}

/// Why a configuration was refused.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Not TOML, or keys that are not known.
    #[error("{}: {text}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What the parser says, with line and key.
        text: String,
    },
    /// A value that makes no sense.
    #[error("{}: line {line}: {key}: {text}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// Line of the value.
        line: usize,
        /// The key.
        key: String,
        /// What is wrong.
        text: String,
    },
    /// Nothing to do.
    #[error("nothing to serve: configure a [[vm]] or [native], or give --socket or --native-socket")]
    Nothing,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    log: Option<String>,
    poll_us: Option<Spanned<u64>>,
    #[serde(default)]
    vm: Vec<VmSection>,
    native: Option<NativeSection>,
    status: Option<StatusSection>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct VmSection {
    name: Spanned<String>,
    socket: Spanned<PathBuf>,
    server: Spanned<String>,
    transport: Option<Spanned<String>>,
    data_connections: Option<Spanned<u32>>,
    rdma: Option<Spanned<Settings>>,
    #[serde(default)]
    limits: LimitsSection,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NativeSection {
    name: Option<Spanned<String>>,
    socket: Option<Spanned<PathBuf>>,
    mode: Option<Spanned<u32>>,
    server: Spanned<String>,
    transport: Option<Spanned<String>>,
    data_connections: Option<Spanned<u32>>,
    rdma: Option<Spanned<Settings>>,
    #[serde(default)]
    limits: LimitsSection,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StatusSection {
    socket: PathBuf,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitsSection {
    max_channels: Option<Spanned<u32>>,
    max_extents: Option<Spanned<u32>>,
    max_channel_mib: Option<Spanned<u64>>,
    max_registered_mib: Option<Spanned<u64>>,
}

/// Reads and checks a configuration file.
pub fn load(path: &Path) -> Result<Config, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    parse(path, &text)
}

/// Checks a configuration's text; `path` is for messages.
pub fn parse(path: &Path, text: &str) -> Result<Config, ConfigError> {
    let file: File = toml::from_str(text).map_err(|e| ConfigError::Syntax {
        path: path.to_owned(),
        text: e.to_string().trim_end().to_owned(),
    })?;
    Checker { path, text }.config(file)
}

struct Checker<'t> {
    path: &'t Path,
    text: &'t str,
}

impl Checker<'_> {
    fn wrong(&self, at: Range<usize>, key: &str, text: impl Into<String>) -> ConfigError {
        let line = self.text.get(..at.start).map_or(1, |before| before.matches('\n').count() + 1);
        ConfigError::Value { path: self.path.to_owned(), line, key: key.to_owned(), text: text.into() }
    }

    fn config(&self, file: File) -> Result<Config, ConfigError> {
        let poll = file
            .poll_us
            .map(|us| self.within(us, "poll_us", 0, 10_000))
            .transpose()?
            .map(Duration::from_micros);
        let (mut names, mut sockets) = (HashMap::new(), HashMap::new());
        let mut vms = Vec::with_capacity(file.vm.len());
        for vm in file.vm {
            let name = self.name(&vm.name, "vm.name")?;
            if let Some(line) = names.insert(name.clone(), self.line(&vm.name)) {
                return Err(self.wrong(
                    vm.name.span(),
                    "vm.name",
                    format!("{name:?} is the name of the vm at line {line} already"),
                ));
            }
            let socket = self.socket(&vm.socket, "vm.socket")?;
            if let Some(line) = sockets.insert(socket.clone(), self.line(&vm.socket)) {
                let text = format!("{} is the socket of the vm at line {line} already", socket.display());
                return Err(self.wrong(vm.socket.span(), "vm.socket", text));
            }
            let limits = self.limits(vm.limits, "vm.limits")?;
            let parts = (&vm.server, vm.transport.as_ref(), vm.data_connections);
            let mut session = self.session("vm", &name, parts, poll, limits)?;
            session.verbs = self.rdma("vm", vm.rdma)?;
            vms.push(Vm { name, socket, session, limits });
        }
        let native = file.native.map(|native| self.native(native, poll)).transpose()?;
        Ok(Config {
            log: file.log.unwrap_or_else(|| "info".to_owned()),
            vms,
            native,
            status: file.status.map(|status| status.socket),
        })
    }

    fn native(&self, native: NativeSection, poll: Option<Duration>) -> Result<Native, ConfigError> {
        let name =
            native.name.as_ref().map_or_else(|| Ok(host_name()), |name| self.name(name, "native.name"))?;
        let socket = match &native.socket {
            Some(socket) => self.socket(socket, "native.socket")?,
            None => protocol::native::DEFAULT_SOCKET.into(),
        };
        let mode = native.mode.map_or(Ok(0o660), |mode| self.within(mode, "native.mode", 0, 0o777))?;
        let limits = self.limits(native.limits, "native.limits")?;
        let parts = (&native.server, native.transport.as_ref(), native.data_connections);
        let mut session = self.session("native", &name, parts, poll, limits)?;
        session.verbs = self.rdma("native", native.rdma)?;
        Ok(Native { socket, mode, session, limits })
    }

    fn session(
        &self,
        section: &str,
        client: &str,
        (server, transport, data_connections): (
            &Spanned<String>,
            Option<&Spanned<String>>,
            Option<Spanned<u32>>,
        ),
        poll: Option<Duration>,
        limits: Limits,
    ) -> Result<SessionConfig, ConfigError> {
        let key = |name: &str| format!("{section}.{name}");
        let address: Address =
            server.get_ref().parse().map_err(|e: host_bridge::framing::AddressError| {
                self.wrong(server.span(), &key("server"), e.to_string())
            })?;
        let mut session = SessionConfig::new(address, client);
        if let Some(transport) = transport {
            session.transport = transport
                .get_ref()
                .parse()
                .map_err(|e: String| self.wrong(transport.span(), &key("transport"), e))?;
            if !session.transport.reaches(&session.server) {
                let text = format!("transport {} cannot reach {}", session.transport, session.server);
                return Err(self.wrong(transport.span(), &key("transport"), text));
            }
        }
        if let Some(count) = data_connections {
            session.data_connections = self.within(count, &key("data_connections"), 1, 16)?;
        }
        session.poll = poll.unwrap_or(session.poll);
        session.max_registered = limits.max_registered;
        Ok(session)
    }

    fn rdma(&self, section: &str, settings: Option<Spanned<Settings>>) -> Result<Settings, ConfigError> {
        let Some(settings) = settings else { return Ok(Settings::default()) };
        let wrong = |e: VerbsError| self.wrong(settings.span(), &format!("{section}.rdma"), e.to_string());
        settings.get_ref().check().map_err(wrong)?;
        Ok(settings.into_inner())
    }

    fn limits(&self, section: LimitsSection, key: &str) -> Result<Limits, ConfigError> {
        let mut limits = Limits::default();
        if let Some(value) = section.max_channels {
            limits.max_channels = self.within(value, &format!("{key}.max_channels"), 1, 65536)?;
        }
        if let Some(value) = section.max_extents {
            limits.max_extents = self.within(value, &format!("{key}.max_extents"), 1, MAX_EXTENTS)?;
        }
        if let Some(value) = section.max_channel_mib {
            limits.max_channel_size = self.within(value, &format!("{key}.max_channel_mib"), 2, 4095)? << 20;
        }
        if let Some(value) = section.max_registered_mib {
            limits.max_registered =
                self.within(value, &format!("{key}.max_registered_mib"), 0, 1 << 40)? << 20;
        }
        Ok(limits)
    }

    fn name(&self, name: &Spanned<String>, key: &str) -> Result<String, ConfigError> {
        check_name(name.get_ref()).map_err(|text| self.wrong(name.span(), key, text))?;
        Ok(name.get_ref().clone())
    }

    fn socket(&self, path: &Spanned<PathBuf>, key: &str) -> Result<PathBuf, ConfigError> {
        if !path.get_ref().is_absolute() {
            return Err(self.wrong(
                path.span(),
                key,
                format!("{} is not an absolute path", path.get_ref().display()),
            ));
        }
        Ok(path.get_ref().clone())
    }

    fn within<T: PartialOrd + Copy + std::fmt::Display>(
        &self,
        value: Spanned<T>,
        key: &str,
        min: T,
        max: T,
    ) -> Result<T, ConfigError> {
        let number = *value.get_ref();
        if number < min || number > max {
            return Err(self.wrong(value.span(), key, format!("{number} is not between {min} and {max}")));
        }
        Ok(number)
    }

    fn line<T>(&self, value: &Spanned<T>) -> usize {
        self.text.get(..value.span().start).map_or(1, |before| before.matches('\n').count() + 1)
    }
}

/// Names go into logs, socket-activation names and the server's messages.
pub fn check_name(name: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 63 || !name.chars().all(fits) {
        return Err(format!("{name:?} is not a name: 1 to 63 letters, digits, '-', '_' and '.'"));
    }
    Ok(())
}

/// This host's name, for the server and for people.
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .unwrap_or_default();
    if check_name(&name).is_ok() { name } else { "host".to_owned() }
}

/// Whether `kind` reaches `address`; for flags, where there is no line to name.
pub fn check_transport(kind: TransportKind, address: &Address) -> Result<(), String> {
    if kind.reaches(address) { Ok(()) } else { Err(format!("transport {kind} cannot reach {address}")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host_bridge::verbs::{DEPTH, QUEUE_PAIRS};

    fn error(text: &str) -> String {
        parse(Path::new("x.toml"), text).unwrap_err().to_string()
    }

    const VM: &str = "[[vm]]\nname = \"a\"\nsocket = \"/run/a.sock\"\nserver = \"tcp:gpu:9700\"\n";

    #[test]
    fn the_example_parses_and_is_complete() {
        let text = include_str!("../vhost-rgpu.toml");
        let config = parse(Path::new("vhost-rgpu.toml"), text).unwrap();
        assert_eq!(config.vms.len(), 1);
        assert!(config.native.is_some() && config.status.is_some());
        // The commented-out settings are defaults: with the comment signs gone it must still parse.
        let all: String = text
            .lines()
            .map(|line| {
                line.strip_prefix("#: ").map_or_else(|| format!("{line}\n"), |line| format!("{line}\n"))
            })
            .collect();
        let config = parse(Path::new("vhost-rgpu.toml"), &all).unwrap();
        assert!(config.vms.iter().all(|vm| vm.limits == Limits::default()));
        assert!(config.vms.iter().all(|vm| vm.session.verbs.queue_pairs == Some(QUEUE_PAIRS)));
        assert!(config.vms.iter().all(|vm| vm.session.verbs.queue_depth == Some(DEPTH)));
    }

    #[test]
    fn a_section_says_how_to_use_rdma() {
        let text = format!("{VM}transport = \"verbs\"\n[vm.rdma]\ndevice = \"mlx5_2\"\nqueue_depth = 64\n");
        let config = parse(Path::new("x"), &text).unwrap();
        let verbs = Settings { device: Some("mlx5_2".into()), queue_depth: Some(64), ..Settings::default() };
        assert_eq!(config.vms[0].session.verbs, verbs);
    }

    #[test]
    fn a_transport_follows_from_the_address() {
        let config = parse(Path::new("x"), &format!("{VM}[native]\nserver = \"unix:/run/s\"\n")).unwrap();
        assert_eq!(config.vms[0].session.transport, TransportKind::Tcp);
        assert_eq!(config.native.unwrap().session.transport, TransportKind::Local);
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        let text = error(&format!("{VM}colour = 1\n"));
        assert!(text.contains("line 5") && text.contains("colour"), "{text}");
    }

    #[test]
    fn a_missing_key_is_named() {
        let text = error("[[vm]]\nname = \"a\"\nsocket = \"/x\"\n");
        assert!(text.contains("server") && text.contains("line 1"), "{text}");
    }

    #[test]
    fn a_wrong_value_is_named_with_line_and_key() {
        for (text, line, key) in [
            (VM.replace("tcp:gpu:9700", "tcp:gpu:port"), 4, "vm.server"),
            (VM.replace("/run/a.sock", "a.sock"), 3, "vm.socket"),
            (VM.replace("\"a\"", "\"a b\""), 2, "vm.name"),
            (format!("{VM}transport = \"local\"\n"), 5, "vm.transport"),
            (format!("{VM}transport = \"carrier-pigeon\"\n"), 5, "vm.transport"),
            (format!("{VM}[vm.limits]\nmax_channels = 0\n"), 6, "vm.limits.max_channels"),
            (format!("{VM}[vm.rdma]\nqueue_pairs = 8\n"), 5, "vm.rdma"),
            (format!("{VM}{VM}"), 6, "vm.name"),
            (format!("{VM}{}", VM.replace("\"a\"", "\"b\"")), 7, "vm.socket"),
            (format!("poll_us = 99999999\n{VM}"), 1, "poll_us"),
        ] {
            let error = error(&text);
            assert!(error.contains(&format!("line {line}: {key}: ")), "{error}");
        }
    }
}
