//! Which of this machine's addresses the network plugin listens at. The user chooses with NCCL's own
//! variables `NCCL_SOCKET_IFNAME` and `NCCL_SOCKET_FAMILY`.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// An address of an interface, with port 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interface {
    pub name: String,
    pub address: SocketAddr,
}

/// The addresses of the interfaces that are up.
pub(crate) fn all() -> Vec<Interface> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: writes a list that is freed below.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut next = first;
    // SAFETY: an entry of the list, or null at its end.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        if entry.ifa_flags & libc::IFF_UP as libc::c_uint == 0 || entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: a name that ends with a zero.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        // SAFETY: an address, whose family says what it is. The C library aligns it.
        let address = unsafe {
            match i32::from((*entry.ifa_addr).sa_family) {
                libc::AF_INET => {
                    let address = &*entry.ifa_addr.cast::<libc::sockaddr_in>();
                    let ip = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
                    SocketAddr::V4(SocketAddrV4::new(ip, 0))
                }
                libc::AF_INET6 => {
                    let address = &*entry.ifa_addr.cast::<libc::sockaddr_in6>();
                    let ip = Ipv6Addr::from(address.sin6_addr.s6_addr);
                    SocketAddr::V6(SocketAddrV6::new(ip, 0, 0, address.sin6_scope_id))
                }
                _ => continue,
            }
        };
        found.push(Interface { name, address });
    }
    // SAFETY: the list from above.
    unsafe { libc::freeifaddrs(first) };
    found
}

/// Chooses an address as NCCL does. `names`: the value of `NCCL_SOCKET_IFNAME`: beginnings of names, with `=`
/// in front whole names, with `^` in front names that are not wanted. `family`: that of `NCCL_SOCKET_FAMILY`.
/// Without names, loopback and Docker's bridge come last.
pub(crate) fn choose(all: &[Interface], names: Option<&str>, family: Option<&str>) -> Option<Interface> {
    let of_family = |interface: &&Interface| match (family, interface.address.ip()) {
        (Some("AF_INET"), ip) => ip.is_ipv4(),
        (Some("AF_INET6"), ip) => ip.is_ipv6(),
        (_, IpAddr::V6(ip)) => !ip.is_unicast_link_local(),
        (_, IpAddr::V4(_)) => true,
    };
    let candidates: Vec<&Interface> = all.iter().filter(of_family).collect();
    let first = |wanted: &dyn Fn(&Interface) -> bool| {
        candidates.iter().find(|interface| wanted(interface)).map(|found| (*found).clone())
    };
    match names.filter(|names| !names.is_empty()) {
        Some(names) => {
            let (not, names) = names.strip_prefix('^').map_or((false, names), |names| (true, names));
            let (whole, names) = names.strip_prefix('=').map_or((false, names), |names| (true, names));
            // The same one may be meant with and without its port.
            let names: Vec<&str> = names.split(',').filter_map(|name| name.split(':').next()).collect();
            let matches = |interface: &Interface| {
                names.iter().any(|name| {
                    if whole { interface.name == *name } else { interface.name.starts_with(name) }
                })
            };
            first(&|interface| matches(interface) != not)
        }
        None => {
            let is_loopback = |interface: &Interface| interface.address.ip().is_loopback();
            let is_docker = |interface: &Interface| interface.name.starts_with("docker");
            first(&|interface| !is_loopback(interface) && !is_docker(interface))
                .or_else(|| first(&|interface| !is_loopback(interface)))
                .or_else(|| first(&|_| true))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interfaces() -> Vec<Interface> {
        [
            ("lo", "127.0.0.1:0"),
            ("lo", "[::1]:0"),
            ("docker0", "172.17.0.1:0"),
            ("eth0", "[fe80::1%2]:0"),
            ("eth0", "10.0.0.4:0"),
            ("eth1", "10.1.0.4:0"),
            ("eth1", "[fd00::4]:0"),
        ]
        .map(|(name, address)| Interface { name: name.into(), address: address.parse().expect("an address") })
        .to_vec()
    }

    fn chosen(names: Option<&str>, family: Option<&str>) -> Option<String> {
        choose(&interfaces(), names, family).map(|found| found.address.to_string())
    }

    #[test]
    fn interfaces_are_chosen_as_by_nccl() {
        let some = |address: &str| Some(address.to_owned());
        assert_eq!(chosen(None, None), some("10.0.0.4:0"));
        assert_eq!(chosen(Some(""), None), some("10.0.0.4:0"));
        assert_eq!(chosen(Some("eth1"), None), some("10.1.0.4:0"));
        assert_eq!(chosen(Some("eth1"), Some("AF_INET6")), some("[fd00::4]:0"));
        assert_eq!(chosen(Some("=eth"), None), None);
        assert_eq!(chosen(Some("=eth1,lo"), None), some("127.0.0.1:0"));
        assert_eq!(chosen(Some("^lo,eth"), None), some("172.17.0.1:0"));
        assert_eq!(chosen(Some("eth1:1"), None), some("10.1.0.4:0"));
        assert_eq!(choose(&interfaces()[..1], None, None).map(|found| found.name), some("lo"));
        assert_eq!(choose(&interfaces()[..3], None, None).map(|found| found.name), some("docker0"));
        assert_eq!(choose(&[], None, None), None);
    }
}
