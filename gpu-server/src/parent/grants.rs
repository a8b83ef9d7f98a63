//! What the rules and a lease give a session that has not begun.

use super::control::Refused;
use super::leases::table::{LeaseId, UNKNOWN};
use super::refusals::Reason;
use super::state::{Server, State};
use super::trust::Principal;
use crate::policy::Grant;
use crate::worker_protocol::Kind;

/// What a client's session may have, by the rules of now.
///
/// # Errors
/// Why it gets no session.
pub(super) fn of(
    server: &Server,
    state: &State,
    kind: Kind,
    who: &Principal,
    lease: Option<LeaseId>,
) -> Result<Grant, Refused> {
    let grant = server.policy().grant(&who.name, &server.options.share);
    let mut grant = grant.map_err(|why| Refused(Reason::NotAllowed, why))?;
    let no_lease = |why: String| Err(Refused(Reason::NoLease, why));
    match (lease, &grant.leasing.required) {
        (None, Some(rule)) if kind == Kind::Gpu => {
            return no_lease(format!(
                "this client's sessions need a lease ({rule}): take one with rgpuctl lease"
            ));
        }
        (None, _) => {}
        (Some(lease), _) => {
            let Some(lease) = state.leases.get(lease) else { return no_lease(UNKNOWN.into()) };
            lease.check_devices(&grant)?;
            lease.narrow(&mut grant.limits);
        }
    }
    Ok(grant)
}
