//! A client in the queue.

use std::sync::Arc;
use std::time::Instant;

use identity::Secret;

use crate::limits::Limits;
use crate::parent::control::Control;
use crate::parent::leases::table::LeaseId;
use crate::parent::trust::Principal;
use crate::policy::{Grant, Rules};
use crate::worker_protocol::{Token, Transport};

/// A client that waits for a worker.
pub(in crate::parent) struct Parked {
    pub(in crate::parent) connection: Arc<Control>,
    pub(in crate::parent) peer: String,
    pub(in crate::parent) client: String,
    pub(in crate::parent) program: String,
    pub(in crate::parent) pid: u32,
    pub(in crate::parent) transport: Transport,
    pub(in crate::parent) data_connections: u32,
    pub(in crate::parent) token: Token,
    pub(in crate::parent) secret: Secret,
    /// The verified client.
    pub(in crate::parent) principal: Principal,
    /// Whether it can be kept without its connections.
    pub(in crate::parent) resumes: bool,
    /// MiB of data that its bridge may send eagerly.
    pub(in crate::parent) eager: u32,
    /// What its session may use, by the rules as they were read so many times.
    pub(in crate::parent) limits: Limits,
    pub(in crate::parent) rules_read: u64,
    /// The lease under which it will run.
    pub(in crate::parent) lease: Option<LeaseId>,
    /// The devices that it requests, by the server's numbers and in its order. Empty: any.
    pub(in crate::parent) devices: Vec<u32>,
    /// The rules that a refusal names.
    pub(in crate::parent) rules: Rules,
    /// Whether the client understands messages about its position in the queue.
    pub(in crate::parent) may_wait: bool,
    /// Whether it shares memory with its worker and takes a pipe that tells when it is gone.
    pub(in crate::parent) takes_presence: bool,
    pub(in crate::parent) since: Instant,
    /// When it was last told its position.
    pub(in crate::parent) told: Option<Instant>,
    /// The number of workers that had failed when it arrived.
    pub(in crate::parent) failures: u64,
}

impl Parked {
    /// From now on, its session may have what the rules give it.
    pub(in crate::parent) fn take(&mut self, grant: Grant) {
        if let (Transport::Tcp { data_connections, .. }, Some(most)) =
            (&mut self.transport, grant.data_connections)
        {
            *data_connections = (*data_connections).min(most);
            self.data_connections = *data_connections;
        }
        (self.limits, self.rules) = (grant.limits, grant.rules);
    }

    /// The transport's name, for the log and the status.
    pub(in crate::parent) fn transport_name(&self) -> &'static str {
        match self.transport {
            Transport::Verbs { .. } => "verbs",
            Transport::Tcp { .. } | Transport::Local => self.connection.transport(),
        }
    }
}

#[cfg(test)]
impl Parked {
    /// A client for tests.
    pub(in crate::parent) fn fake() -> Parked {
        let (connection, _) = std::os::unix::net::UnixStream::pair().unwrap();
        Parked {
            connection: Arc::new(Control::Local(connection)),
            peer: "this host".into(),
            client: "test".into(),
            program: "a test".into(),
            pid: 0,
            transport: Transport::Local,
            data_connections: 0,
            token: [0; 16],
            secret: Secret([0; 32]),
            principal: Principal::test(),
            resumes: false,
            eager: 0,
            devices: Vec::new(),
            limits: Limits::default(),
            rules_read: 0,
            lease: None,
            rules: Rules { sessions: "--client-sessions".into(), ..Rules::default() },
            may_wait: true,
            takes_presence: false,
            since: Instant::now(),
            told: None,
            failures: 0,
        }
    }
}
