//! Which servers a process uses.
//!
//! The host offers a list of servers. A process uses all of them, unless `RGPU_SERVERS` names servers among
//! those that the host lets its programs choose. There is one channel for each server; its header says for
//! which one.

use std::ffi::OsStr;
use std::path::PathBuf;

use crate::port::PortError;
use protocol::channel::{Header, MAX_SERVERS, SERVER_NAME_SIZE};

/// The environment variable with which a user chooses servers.
const VARIABLE: &str = "RGPU_SERVERS";

/// The server of a session.
#[derive(Debug, Clone, Copy)]
pub struct Choice<'n> {
    /// Its index among the process's servers.
    pub index: usize,
    /// Its name, if the user chose it.
    pub name: Option<&'n str>,
}

impl Choice<'_> {
    /// Writes the request for this server into the channel's header, before the channel is connected.
    pub(crate) fn write_to(&self, header: &Header) {
        // All zeros stand for the first server, and a new channel has zeros already.
        if self.index > 0 || self.name.is_some() {
            header.ask_for_server(self.index as u32, self.name.unwrap_or_default());
        }
    }
}

/// The domain, bus and device in `domain:bus:device` or `bus:device`, and the function's text if `.function`
/// follows. The numbers are hexadecimal.
pub fn parse_pci(text: &str) -> Option<([u32; 3], Option<&str>)> {
    let (address, function) =
        text.split_once('.').map_or((text, None), |(address, function)| (address, Some(function)));
    let parts: Result<Vec<u32>, _> = address.split(':').map(|part| u32::from_str_radix(part, 16)).collect();
    match parts.ok()?[..] {
        [domain, bus, device] => Some(([domain, bus, device], function)),
        [bus, device] => Some(([0, bus, device], function)),
        _ => None,
    }
}

/// The PCI domain that a program sees for a PCI domain of one of its servers, since devices of two servers
/// may have the same PCI addresses. The domains of the first server do not change.
pub fn distinct_domain(server: usize, domain: u32) -> u32 {
    const { assert!(MAX_SERVERS <= 16) };
    if server == 0 { domain } else { domain.wrapping_add((server as u32) << 12) & 0xffff }
}

/// The servers that `RGPU_SERVERS` names, separated by spaces; none if it is not set.
pub(crate) fn named() -> Result<Vec<String>, PortError> {
    parse(&std::env::var_os(VARIABLE).unwrap_or_default()).map_err(|reason| PortError::Refused {
        path: PathBuf::from(VARIABLE),
        what: "cannot be used",
        reason,
    })
}

fn parse(text: &OsStr) -> Result<Vec<String>, String> {
    let text = text.to_str().ok_or("it is not UTF-8")?;
    let names: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
    if names.len() > MAX_SERVERS {
        return Err(format!("{} servers, and a program can use {MAX_SERVERS}", names.len()));
    }
    match names.iter().find(|name| name.len() >= SERVER_NAME_SIZE) {
        Some(name) => {
            // The key of a lease follows.
            let name = name.split('#').next().unwrap_or_default();
            Err(format!("{name}: a server's name has fewer than {SERVER_NAME_SIZE} bytes"))
        }
        None => Ok(names),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn pci_addresses_are_read_in_both_forms() {
        assert_eq!(parse_pci("00000000:1B:00.0"), Some(([0, 0x1b, 0], Some("0"))));
        assert_eq!(parse_pci("ffff:00:03"), Some(([0xffff, 0, 3], None)));
        assert_eq!(parse_pci("1b:02.7"), Some(([0, 0x1b, 2], Some("7"))));
        assert_eq!(parse_pci("nonsense"), None);
    }

    #[test]
    fn servers_have_different_pci_domains() {
        assert_eq!([0, 1, 15].map(|server| distinct_domain(server, 0)), [0, 0x1000, 0xf000]);
        assert_eq!((distinct_domain(0, 0x10000), distinct_domain(1, 0xf001)), (0x10000, 1));
    }

    #[test]
    fn names_are_separated_by_spaces_because_commas_separate_devices() {
        let names = parse(OsStr::new(" gpu1  gpu2:9700/0,2 "));
        assert_eq!(names, Ok(vec!["gpu1".to_owned(), "gpu2:9700/0,2".to_owned()]));
        assert_eq!(parse(OsStr::new("")), Ok(Vec::new()));
        assert_eq!(parse(OsStr::from_bytes(b"gpu1\xff")), Err("it is not UTF-8".to_owned()));
    }

    #[test]
    fn too_many_servers_and_too_long_names_are_refused_with_the_limit() {
        let parse = |name: &str, count: usize| parse(OsStr::new(&name.repeat(count)));
        assert_eq!(parse("a ", 17), Err("17 servers, and a program can use 16".to_owned()));
        assert!(parse("a", 256).unwrap_err().ends_with("a server's name has fewer than 256 bytes"));
        assert!(parse("a", 255).is_ok());
    }
}
