//! Why a relay ended.

/// Why a relay ended.
#[derive(Debug)]
pub(in crate::bridge) enum EndReason {
    /// The client did what no correct client does.
    Client(String),
    /// The server did what no correct server does.
    Server(String),
    /// A connection to the server broke.
    Gone(String),
    /// The server said goodbye.
    Bye(String),
    /// Something on this host failed.
    Here(String),
    /// [`Transport::close`](crate::bridge::Transport::close).
    Asked(String),
    /// [`Transport::pause`](crate::bridge::Transport::pause): the session goes on later.
    Paused,
}

impl EndReason {
    /// The reason in words, for the client and for a log.
    pub(super) fn text(&self, server: &str) -> String {
        match self {
            EndReason::Client(what) => format!("malformed command in the channel: {what}"),
            EndReason::Server(what) => {
                format!("the server at {server} does not keep to the protocol: {what}")
            }
            EndReason::Gone(what) => format!("connection to the server at {server} lost: {what}"),
            EndReason::Bye(what) if what.is_empty() => format!("the server at {server} ended the session"),
            EndReason::Bye(what) => format!("the server at {server} ended the session: {what}"),
            EndReason::Here(what) => {
                format!("this host failed while talking to the server at {server}: {what}")
            }
            EndReason::Asked(what) => what.clone(),
            EndReason::Paused => "the session is paused".to_owned(),
        }
    }
}
