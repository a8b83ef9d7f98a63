//! What a device process serves, as the keeper tells it and as logs name it.

use std::fmt;
use std::str::FromStr;

/// What a device process serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// The virtual machine with this name.
    Vm(String),
    /// The programs of a user of this host.
    Native(u32),
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Role::Vm(name) => write!(f, "vm {name}"),
            Role::Native(uid) => write!(f, "user {uid}"),
        }
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Role, String> {
        let role = match text.split_once(' ') {
            Some(("vm", name)) => Some(Role::Vm(name.to_owned())),
            Some(("user", uid)) => uid.parse().ok().map(Role::Native),
            _ => None,
        };
        role.ok_or_else(|| format!("{text:?} is not what a device process can serve"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_survives_the_command_line() {
        for role in [Role::Vm("guest-1.example".to_owned()), Role::Native(1000)] {
            assert_eq!(role.to_string().parse(), Ok(role));
        }
        for wrong in ["", "vm", "user root", "guest 1"] {
            assert!(wrong.parse::<Role>().is_err(), "{wrong}");
        }
    }
}
