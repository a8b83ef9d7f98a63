//! A server as a configuration or a user names it: `ADDRESS/DEVICE,DEVICE#LEASE`, of which only the address
//! must be there.

use std::fmt;
use std::str::FromStr;

use identity::Secret;
use protocol::link::MAX_DEVICE_LIST;
use thiserror::Error;

use crate::framing::{Address, AddressError};

/// A server as a configuration or a user names it: an address, and the devices to use there, or a lease of
/// some.
#[derive(Debug, Clone)]
pub struct Server {
    /// Its address.
    pub address: Address,
    /// Numbers of its devices, in the order in which programs see them. Empty: those that the server gives.
    pub devices: Vec<u8>,
    /// The key of the lease under which to use it, if any.
    pub lease: Option<Secret>,
}

/// Why a text names no server.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ServerError {
    /// It has no address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// Its list of devices is wrong.
    #[error(
        "{0:?}: the devices behind the last \"/\" are numbers below 255, separated by commas, none twice, at most {MAX_DEVICE_LIST}"
    )]
    Devices(String),
    /// What is behind its "#" is no lease's key. The text is not repeated, because part of a key may be in
    /// it.
    #[error("what follows \"#\" is the key of a lease, 64 hexadecimal digits, as rgpuctl lease prints it")]
    Lease,
}

impl FromStr for Server {
    type Err = ServerError;

    /// `ADDRESS` or `ADDRESS/DEVICE,DEVICE…`, and then perhaps `#LEASE`.
    fn from_str(text: &str) -> Result<Server, ServerError> {
        let (text, lease) = match text.rsplit_once('#') {
            Some((text, key)) => (text, Some(Secret::from_text(key).ok_or(ServerError::Lease)?)),
            None => (text, None),
        };
        let is_list = |list: &str| !list.is_empty() && list.chars().all(|c| c.is_ascii_digit() || c == ',');
        let (address, list) = match text.rsplit_once('/') {
            Some((address, list)) if is_list(list) => (address, list),
            // The path of a Unix socket may go on, but not a host's name.
            Some((host, _)) if matches!(host.parse(), Ok(Address::Tcp(..))) => {
                return Err(ServerError::Devices(text.to_owned()));
            }
            _ => return Ok(Server { address: text.parse()?, devices: Vec::new(), lease }),
        };
        let wrong = || ServerError::Devices(text.to_owned());
        let mut devices = Vec::new();
        for number in list.split(',') {
            let number = number.parse().ok().filter(|number| *number < u8::MAX).ok_or_else(wrong)?;
            if devices.contains(&number) || devices.len() == MAX_DEVICE_LIST {
                return Err(wrong());
            }
            devices.push(number);
        }
        Ok(Server { address: address.parse()?, devices, lease })
    }
}

impl fmt::Display for Server {
    /// Without the lease's key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)?;
        let numbers: Vec<String> = self.devices.iter().map(u8::to_string).collect();
        if numbers.is_empty() { Ok(()) } else { write!(f, "/{}", numbers.join(",")) }
    }
}

impl Server {
    /// The text of a server with the key of its lease, which is a secret.
    pub fn with_key(&self) -> String {
        let key = self.lease.map(|key| format!("#{}", key.to_text())).unwrap_or_default();
        format!("{self}{key}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_an_address_and_its_devices() {
        let parse = |text: &str| text.parse::<Server>().map(|server| (server.to_string(), server.devices));
        assert_eq!(parse("gpu1"), Ok(("tcp:gpu1:9700".to_owned(), vec![])));
        assert_eq!(parse("gpu2:9701/2,0"), Ok(("tcp:gpu2:9701/2,0".to_owned(), vec![2, 0])));
        assert_eq!(
            parse("unix:/run/rgpu/server.sock"),
            Ok(("unix:/run/rgpu/server.sock".to_owned(), vec![]))
        );
        assert_eq!(parse("unix:/run/server.sock/1"), Ok(("unix:/run/server.sock/1".to_owned(), vec![1])));
        for wrong in ["gpu1/0,0", "gpu1/255", "gpu1/0,", "gpu1/,", "gpu1/999", "gpu1/x", "gpu1/0,x", "gpu1/"]
        {
            assert!(matches!(parse(wrong), Err(ServerError::Devices(_))), "{wrong}");
        }
        for wrong in ["/run/rgpu/server.sock", "http://gpu1/0", "gpu1:port/0"] {
            assert!(matches!(parse(wrong), Err(ServerError::Address(_))), "{wrong}");
        }
        assert_eq!(parse("unix:/run/rgpu"), Ok(("unix:/run/rgpu".to_owned(), vec![])));
        // A key is kept, and not shown.
        let leased: Server = format!("gpu1/2#{}", "0a".repeat(32)).parse().unwrap();
        assert_eq!((leased.to_string(), leased.lease.unwrap().0), ("tcp:gpu1:9700/2".to_owned(), [10; 32]));
        assert_eq!(leased.with_key(), format!("tcp:gpu1:9700/2#{}", "0a".repeat(32)));
        for wrong in ["gpu1#", "gpu1#12", &format!("gpu1#{}", "zz".repeat(32))] {
            assert!(matches!(parse(wrong), Err(ServerError::Lease)), "{wrong}");
        }
    }
}
