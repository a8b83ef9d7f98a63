//! What each client may use: `clients.toml`, which the operator writes and the daemon reads at its start and
//! on SIGHUP.
//!
//! ```toml
//! memory_limit = "20G"              # for everybody, in place of the server's own option
//!
//! [[group]]
//! name = "research"
//! devices = [2, 3]
//! client_sessions = 8
//!
//! [[client]]
//! name = "host1"                    # as `rgpuctl clients` lists it; or uid:N, or insecure:ADDRESS
//! group = "research"
//! weight = 200
//! ```
//!
//! A key missing from a client's section is taken from its group's, then from those outside any section, then
//! from the server's options. A refusal names the line that caused it.

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;

use clap::{Args, value_parser};
use identity::authority::is_certified_name;
use identity::principals::check_name;
use options::document::Part;
use options::{File, Given, Layer, Section, parse_size};

use crate::config::{Share, Sharing};
use crate::limits::Limits;

/// The rules for clients in one section.
#[derive(Debug, Clone, Default, Args)]
struct Rule {
    /// Whether these clients may use the server. With false outside any section, only clients with their own
    /// section or a group may
    #[arg(long, value_name = "BOOL")]
    allow: Option<bool>,
    /// Ordinals of the devices that they may use
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    devices: Vec<u32>,
    /// Number of devices of a client: each session gets the least used ones, or those that its others have. 0
    /// means all
    #[arg(long, value_name = "N")]
    session_devices: Option<u32>,
    /// Whether a client's devices also serve others while it has a session
    #[arg(long, value_enum)]
    sharing: Option<Sharing>,
    /// Maximum memory of one session on each device, in bytes or with a unit (K, M, G, T). 0 means no limit
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory_limit: Option<u64>,
    /// Maximum memory of all sessions of one client together on each device, under leases and outside. 0
    /// means no limit
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    client_memory_limit: Option<u64>,
    /// Maximum page-locked memory on the server's machine that the programs of one session may have for
    /// kernels. 0 means no limit
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pinned_limit: Option<u64>,
    /// Maximum page-locked memory of all sessions of one client together. 0 means no limit
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    client_pinned_limit: Option<u64>,
    /// Maximum number of sessions of one client, including those waiting for a worker. Sessions that only
    /// query NVML are counted separately. 0 means no limit
    #[arg(long, value_name = "N")]
    client_sessions: Option<u32>,
    /// Maximum number of sessions that one client may begin within a minute. 0 means no limit
    #[arg(long, value_name = "N")]
    sessions_per_minute: Option<u32>,
    /// Maximum TCP connections for bulk data of one session, 1 to 16; a session that asks for more gets this
    /// many
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=16))]
    data_connections: Option<u32>,
    /// Share of a GPU's time while others want it, too, in proportion to the weights. The default is 100
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=10_000))]
    weight: Option<u32>,
    /// While a client with a higher priority has work for a GPU, those with lower ones wait. The default is 0
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    priority: Option<i32>,
    /// Maximum run time in seconds of a kernel, or of a graph launched as a whole. 0 means no limit
    #[arg(long, value_name = "N")]
    kernel_seconds: Option<u32>,
    /// Seconds to keep a session over TCP or verbs whose connections are lost, with everything it has on the
    /// devices. 0 ends it with its connections. The default is the server's
    #[arg(long, value_name = "N")]
    grace_seconds: Option<u32>,
    /// Maximum number of leases that one client may hold. 0 means none. The default is 16
    #[arg(long, value_name = "N")]
    leases: Option<u32>,
    /// Whether its leases may exclude others from their GPUs. The default is false
    #[arg(long, value_name = "BOOL")]
    exclusive_leases: Option<bool>,
    /// Maximum minutes before a lease must be renewed. The default is 1440, a day
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=525_600))]
    lease_minutes: Option<u32>,
    /// Whether sessions need a lease. Sessions that only query NVML need none. The default is false
    #[arg(long, value_name = "BOOL")]
    lease_required: Option<bool>,
    /// Whether device memory of idle sessions may be moved to the server's memory, if the server does that.
    /// The default is true
    #[arg(long, value_name = "BOOL")]
    swappable: Option<bool>,
}

/// A `[[group]]`.
#[derive(Debug, Args)]
struct GroupSection {
    /// Name of the group: letters, digits, "-", "_" and "."
    #[arg(id = "group.name", long = "name", value_name = "NAME")]
    name: Option<String>,
    /// Whether its members count as one client: they share a client's limits, its turns on a GPU, and its
    /// exclusive devices
    #[arg(id = "group.together", long = "together", value_name = "BOOL")]
    together: Option<bool>,
    #[command(flatten)]
    rule: Rule,
}

/// A `[[client]]`.
#[derive(Debug, Args)]
struct ClientSection {
    /// Name of the client, as rgpuctl clients lists it; cert:NAME for one with an authority's certificate;
    /// uid:N for a user of this machine; insecure:ADDRESS without TLS
    #[arg(id = "client.name", long = "name", value_name = "NAME")]
    name: Option<String>,
    /// The group it belongs to
    #[arg(id = "client.group", long = "group", value_name = "NAME")]
    group: Option<String>,
    #[command(flatten)]
    rule: Rule,
}

/// A rule, with the lines of its keys.
#[derive(Debug, Default)]
struct Written {
    rule: Rule,
    lines: HashMap<&'static str, usize>,
}

#[derive(Debug)]
struct Group {
    together: bool,
    written: Written,
}

#[derive(Debug)]
struct Client {
    group: Option<String>,
    written: Written,
}

/// The rules for all clients. Without a file, there are none.
#[derive(Debug, Default)]
pub struct Policy {
    /// The file's name, for refusals.
    file: String,
    everybody: Written,
    groups: HashMap<String, Group>,
    clients: HashMap<String, Client>,
}

/// What one client may use, and which rules say so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// What its session may use.
    pub limits: Limits,
    /// The rules that refusals name.
    pub rules: Rules,
    /// Maximum data connections of its session.
    pub data_connections: Option<u32>,
    /// The leases it may have.
    pub leasing: Leasing,
}

/// The leases a client may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leasing {
    /// How many, and the rule.
    pub most: (u32, String),
    /// Whether exclusive ones are allowed, and the rule.
    pub exclusive: (bool, String),
    /// For how many seconds, and the rule.
    pub seconds: (u64, String),
    /// The rule that requires a lease for its sessions, if there is one.
    pub required: Option<String>,
}

/// How many leases a client may hold where no rule says otherwise.
const LEASES: u32 = 16;
/// Minutes of a lease where no rule says otherwise.
const LEASE_MINUTES: u32 = 24 * 60;

/// The rules behind the admission of a client's sessions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    /// The rule about the number of its sessions.
    pub sessions: String,
    /// How many sessions it may begin within a minute, and the rule.
    pub sessions_per_minute: Option<(u32, String)>,
    /// The rule about its devices, if it may not use all of them or has them exclusively.
    pub devices: Option<String>,
}

/// Keys that a refusal may name.
const NAMED: [&str; 9] = [
    "allow",
    "client_sessions",
    "sessions_per_minute",
    "devices",
    "sharing",
    "leases",
    "exclusive_leases",
    "lease_minutes",
    "lease_required",
];

impl Rules {
    /// Why a client has no devices, with the rule behind it.
    pub fn explain(&self, why: String) -> String {
        match &self.devices {
            Some(rule) => format!("{why} ({rule})"),
            None => why,
        }
    }
}

impl Written {
    fn new(rule: Rule, section: &Section) -> Written {
        Written { rule, lines: NAMED.into_iter().map(|key| (key, section.line_of(key))).collect() }
    }
}

/// The principal of everybody at an address, without TLS. An IPv4 address that a socket for both kinds
/// reports as an IPv6 address is meant, too.
pub fn insecure_name(address: IpAddr) -> String {
    format!("insecure:{}", address.to_canonical())
}

/// What a principal is called now. Earlier versions wrote the addresses of clients without TLS otherwise.
pub fn current_name(name: &str) -> String {
    let address = name.strip_prefix("insecure:").and_then(|text| text.trim_matches(['[', ']']).parse().ok());
    address.map_or_else(|| name.to_owned(), insecure_name)
}

impl Policy {
    /// Reads the rules. `shared`: the devices that the server shares; empty: all.
    pub fn read(path: &Path, shared: &[u32]) -> Result<Policy, options::Error> {
        Policy::of(&File::read(path, &["group", "client"])?, path, shared)
    }

    fn of<'f>(file: &'f File, path: &Path, shared: &[u32]) -> Result<Policy, options::Error> {
        let given = Given::nothing();
        let layer = |section| Layer { given: &given, section: Some((file, section)) };
        let check = |section: &'f Section, rule: &Rule| {
            let wrong = |text: String| Err(layer(section).wrong("devices", text));
            if rule.devices.is_empty() && section.has("devices") {
                return wrong("names no device; allow = false keeps clients out".into());
            }
            match rule.devices.iter().find(|n| !shared.is_empty() && !shared.contains(n)) {
                Some(number) => wrong(format!("the server does not share device {number}")),
                None => Ok(()),
            }
        };
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let mut policy = Policy { file: name, ..Policy::default() };
        for section in file.sections("") {
            let rule: Rule = layer(section).read()?;
            check(section, &rule)?;
            policy.everybody = Written::new(rule, section);
        }
        for section in file.sections("group") {
            let GroupSection { name, together, rule } = layer(section).read()?;
            let wrong = |text: String| Err(layer(section).wrong("name", text));
            let Some(name) = name else { return wrong("is missing".into()) };
            if let Err(why) = check_name(&name) {
                return wrong(why);
            }
            check(section, &rule)?;
            let group = Group { together: together.unwrap_or(false), written: Written::new(rule, section) };
            if policy.groups.insert(name.clone(), group).is_some() {
                return wrong(format!("there is a group {name} already"));
            }
        }
        for section in file.sections("client") {
            let ClientSection { name, group, rule } = layer(section).read()?;
            let wrong = |text: String| Err(layer(section).wrong("name", text));
            let Some(mut name) = name else { return wrong("is missing".into()) };
            let by_address = match name.strip_prefix("insecure:") {
                Some(address) => match address.trim_matches(['[', ']']).parse() {
                    Ok(address) => Some(insecure_name(address)),
                    Err(_) => return wrong(format!("{address} is not an IP address")),
                },
                None => None,
            };
            let by_server = name.strip_prefix("uid:").is_some_and(|uid| uid.parse::<u32>().is_ok())
                || by_address.is_some()
                || is_certified_name(&name);
            name = by_address.unwrap_or(name);
            if let (false, Err(why)) = (by_server, check_name(&name)) {
                return wrong(why);
            }
            if let Some(group) = group.as_ref().filter(|group| !policy.groups.contains_key(*group)) {
                return Err(layer(section).wrong("group", format!("there is no group {group}")));
            }
            check(section, &rule)?;
            let client = Client { group, written: Written::new(rule, section) };
            if policy.clients.insert(name.clone(), client).is_some() {
                return wrong(format!("there is a section for {name} already"));
            }
        }
        Ok(policy)
    }

    /// How many groups and clients it names.
    pub fn counts(&self) -> (usize, usize) {
        (self.groups.len(), self.clients.len())
    }

    /// What a client may use; `share` has the values where there is no rule. The error says why it may use
    /// nothing.
    pub fn grant(&self, principal: &str, share: &Share) -> Result<Grant, String> {
        let client = self.clients.get(principal);
        let group = client.and_then(|client| client.group.as_ref());
        let group = group.and_then(|name| self.groups.get_key_value(name));
        let places = [client.map(|client| &client.written), group.map(|(_, group)| &group.written)];
        let places: Vec<&Written> = places.into_iter().flatten().chain([&self.everybody]).collect();
        let rule = |key: &'static str, written: &Written| {
            let line = written.lines.get(key).copied().unwrap_or(0);
            format!("{}, line {line}: {key}", self.file)
        };
        // Clients with a section may use the server, unless a rule forbids it.
        let allow = places.iter().find_map(|written| {
            match (written.rule.allow, std::ptr::eq(*written, &self.everybody)) {
                (Some(true), _) => Some(Ok(())),
                (Some(false), _) => Some(Err(rule("allow", written))),
                (None, everybody) => (!everybody).then_some(Ok(())),
            }
        });
        if let Some(Err(rule)) = allow {
            return Err(format!("{principal} may not use this server ({rule} = false)"));
        }
        fn first<T: Copy>(places: &[&Written], of: impl Fn(&Rule) -> Option<T>) -> Option<T> {
            places.iter().find_map(|written| of(&written.rule))
        }
        let account = match group {
            Some((name, group)) if group.together => format!("group:{name}"),
            _ => principal.to_owned(),
        };
        let mut limits = share.limits(account);
        let devices = places.iter().find(|written| !written.rule.devices.is_empty());
        limits.devices = devices.map(|written| written.rule.devices.clone()).unwrap_or_default();
        let set = |to: &mut u64, of: fn(&Rule) -> Option<u64>| *to = first(&places, of).unwrap_or(*to);
        set(&mut limits.session.device_memory, |rule| rule.memory_limit);
        set(&mut limits.total.device_memory, |rule| rule.client_memory_limit);
        limits.client_memory = limits.total.device_memory;
        set(&mut limits.session.pinned_memory, |rule| rule.pinned_limit);
        set(&mut limits.total.pinned_memory, |rule| rule.client_pinned_limit);
        limits.device_count = first(&places, |rule| rule.session_devices).unwrap_or(limits.device_count);
        let sharing = places.iter().find(|written| written.rule.sharing.is_some());
        let written = sharing.and_then(|written| written.rule.sharing);
        limits.exclusive = written.map_or(limits.exclusive, |sharing| sharing == Sharing::Exclusive);
        let exclusive = match sharing {
            Some(written) => rule("sharing", written),
            None => "--sharing".to_owned(),
        };
        let of_devices: Vec<String> = (devices.map(|written| rule("devices", written)).into_iter())
            .chain(limits.exclusive.then_some(exclusive))
            .collect();
        limits.weight = first(&places, |rule| rule.weight).unwrap_or(limits.weight);
        limits.priority = first(&places, |rule| rule.priority).unwrap_or(limits.priority);
        limits.kernel_seconds = first(&places, |rule| rule.kernel_seconds).unwrap_or(limits.kernel_seconds);
        limits.swappable = first(&places, |rule| rule.swappable).unwrap_or(limits.swappable);
        limits.grace_seconds = first(&places, |rule| rule.grace_seconds);
        let mut sessions_rule = "--client-sessions".to_owned();
        if let Some(written) = places.iter().find(|written| written.rule.client_sessions.is_some()) {
            limits.sessions = written.rule.client_sessions;
            sessions_rule = rule("client_sessions", written);
        }
        let paced =
            places.iter().find_map(|w| Some((w.rule.sessions_per_minute?, rule("sessions_per_minute", w))));
        fn with_rule<T: Copy>(
            places: &[&Written],
            (key, of): (&'static str, impl Fn(&Rule) -> Option<T>),
            rule: impl Fn(&'static str, &Written) -> String,
        ) -> Option<(T, String)> {
            places.iter().find_map(|written| Some((of(&written.rule)?, rule(key, written))))
        }
        let unwritten = |key: &str| format!("{key}, which clients.toml can change");
        let leases = with_rule(&places, ("leases", |r| r.leases), rule);
        let exclusive = with_rule(&places, ("exclusive_leases", |r| r.exclusive_leases), rule);
        let minutes = with_rule(&places, ("lease_minutes", |r| r.lease_minutes), rule);
        let required = with_rule(&places, ("lease_required", |r| r.lease_required), rule);
        let (minutes, minutes_rule) = minutes.unwrap_or_else(|| (LEASE_MINUTES, unwritten("lease_minutes")));
        let leasing = Leasing {
            most: leases.unwrap_or_else(|| (LEASES, unwritten("leases"))),
            exclusive: exclusive.unwrap_or_else(|| (false, unwritten("exclusive_leases"))),
            seconds: (u64::from(minutes) * 60, minutes_rule),
            required: required.and_then(|(required, rule)| required.then_some(rule)),
        };
        Ok(Grant {
            leasing,
            limits,
            rules: Rules {
                sessions: sessions_rule,
                sessions_per_minute: paced.filter(|(most, _)| *most > 0),
                devices: (!of_devices.is_empty()).then(|| of_devices.join("; ")),
            },
            data_connections: first(&places, |rule| rule.data_connections),
        })
    }
}

/// The example file: `rgpu-server --print-clients`, and the packaged `clients.toml`.
pub fn example() -> String {
    options::document::example(
        "What each client of rgpu-server may use. The server reads it at its start (--clients) and on SIGHUP. Check it with: rgpu-server --clients FILE --check-config\n\n\
         What a client's section does not say, its group's does; then the keys outside any section; then the options of rgpu-server. Lines that begin with \"#: \" are examples.",
        &parts(),
    )
}

/// The parts of the file, for its documentation. Keys valid for everybody are shown once.
fn parts() -> [Part; 3] {
    let command = || clap::Command::new("options");
    let hide = |own: [&'static str; 2]| {
        move |arg: clap::Arg| {
            let hidden = !own.contains(&arg.get_id().as_str());
            arg.hide(hidden)
        }
    };
    [
        Part {
            name: "",
            repeated: false,
            commented: false,
            text: "",
            options: Rule::augment_args(command()),
            set: &[],
            examples: &[
                ("allow", "true"),
                ("devices", "[0, 1]"),
                ("session_devices", "1"),
                ("sharing", "\"shared\""),
                ("memory_limit", "\"20G\""),
                ("client_memory_limit", "\"40G\""),
                ("pinned_limit", "\"16G\""),
                ("client_pinned_limit", "\"32G\""),
                ("client_sessions", "16"),
                ("sessions_per_minute", "600"),
                ("data_connections", "8"),
                ("weight", "100"),
                ("priority", "0"),
                ("kernel_seconds", "0"),
                ("grace_seconds", "600"),
                ("leases", "16"),
                ("exclusive_leases", "false"),
                ("lease_minutes", "1440"),
                ("lease_required", "false"),
                ("swappable", "true"),
            ],
        },
        Part {
            name: "group",
            repeated: true,
            commented: false,
            text: "One section per group of clients. All keys above are valid here, too.",
            options: GroupSection::augment_args(command()).mut_args(hide(["group.name", "group.together"])),
            set: &[("name", "\"research\"")],
            examples: &[("together", "false")],
        },
        Part {
            name: "client",
            repeated: true,
            commented: false,
            text: "One section for each client with its own rules or a group. All keys above are valid here, too.",
            options: ClientSection::augment_args(command()).mut_args(hide(["client.name", "client.group"])),
            set: &[("name", "\"host1\""), ("group", "\"research\"")],
            examples: &[],
        },
    ]
}

/// For fuzzing: reads rules, and asks what clients may use by them. Gives how many were allowed something, if
/// the rules are valid.
#[cfg(any(test, fuzzing))]
pub fn policy_any(text: &str) -> Option<usize> {
    let path = Path::new("clients.toml");
    let file = File::parse(path, text, &["group", "client"]).ok()?;
    let policy = Policy::of(&file, path, &[0, 1, 2, 3]).ok()?;
    let share = crate::config::Serve::from_flags(&[]).share;
    let strangers = ["uid:0", "insecure:10.0.0.1", "cert:host", "nobody", ""];
    let names = policy.clients.keys().map(String::as_str).chain(strangers);
    let allowed = names.filter(|name| match policy.grant(name, &share) {
        Ok(Grant { limits, rules, data_connections, leasing }) => {
            assert!(limits.devices.iter().all(|device| *device < 4), "{limits:?}");
            assert!(
                (1..=10_000).contains(&limits.weight)
                    && data_connections.is_none_or(|most| (1..=16).contains(&most))
            );
            assert!(leasing.seconds.0 > 0 && !rules.sessions.is_empty());
            true
        }
        Err(why) => {
            assert!(why.contains("clients.toml, line "), "a refusal without its rule: {why}");
            false
        }
    });
    Some(allowed.count())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Serve;

    fn policy(text: &str) -> Result<Policy, String> {
        let path = Path::new("/etc/rgpu/clients.toml");
        let file = File::parse(path, text, &["group", "client"]).map_err(|e| e.to_string())?;
        Policy::of(&file, path, &[0, 1, 2, 3]).map_err(|e| e.to_string())
    }

    fn share(flags: &[&str]) -> Share {
        Serve::from_flags(flags).share
    }

    #[test]
    fn any_of_the_rules_may_be_cut_short() {
        assert_eq!(policy_any(TEXT).map(|allowed| allowed > 0), Some(true));
        for end in (0..TEXT.len()).filter(|end| TEXT.is_char_boundary(*end)) {
            policy_any(&TEXT[..end]);
        }
    }

    const TEXT: &str = "\
memory_limit = \"1G\"
weight = 50

[[group]]
name = \"research\"
devices = [2, 3]
client_sessions = 8
memory_limit = \"2G\"
priority = -1

[[group]]
name = \"class\"
together = true
sharing = \"exclusive\"
sessions_per_minute = 30

[[client]]
name = \"host1\"
group = \"research\"
memory_limit = \"3G\"
client_sessions = 2

[[client]]
name = \"host2\"
group = \"research\"

[[client]]
name = \"uid:1000\"
group = \"class\"

[[client]]
name = \"thief\"
allow = false
";

    #[test]
    fn a_clients_rules_come_before_its_groups_everybodys_and_the_servers() {
        let policy = policy(TEXT).unwrap();
        assert_eq!(policy.counts(), (2, 4));
        let share = share(&["--memory-limit=9G", "--client-memory-limit=10G", "--client-sessions=77"]);
        let of = |name| policy.grant(name, &share).unwrap();
        let (host1, host2, other) = (of("host1"), of("host2"), of("other"));
        let memory = |grant: &Grant| {
            (grant.limits.session.device_memory >> 30, grant.limits.total.device_memory >> 30)
        };
        assert_eq!((memory(&host1), memory(&host2), memory(&other)), ((3, 10), (2, 10), (1, 10)));
        let sessions = |grant: &Grant| (grant.limits.sessions, grant.rules.sessions.clone());
        assert_eq!(sessions(&host1), (Some(2), "clients.toml, line 21: client_sessions".into()));
        assert_eq!(sessions(&host2), (Some(8), "clients.toml, line 7: client_sessions".into()));
        assert_eq!(sessions(&other), (Some(77), "--client-sessions".into()));
        assert_eq!((host1.limits.devices, other.limits.devices), (vec![2, 3], vec![]));
        assert_eq!(
            (host1.rules.devices, other.rules.devices),
            (Some("clients.toml, line 6: devices".into()), None)
        );
        assert_eq!((host2.limits.weight, host2.limits.priority), (50, -1));
        assert_eq!((host1.limits.principal.as_str(), host2.limits.principal.as_str()), ("host1", "host2"));
    }

    #[test]
    fn members_of_a_group_may_count_as_one() {
        let policy = policy(TEXT).unwrap();
        let user = policy.grant("uid:1000", &share(&[])).unwrap();
        assert_eq!((user.limits.principal.as_str(), user.limits.exclusive), ("group:class", true));
        let paced = Some((30, "clients.toml, line 15: sessions_per_minute".into()));
        assert_eq!(user.rules.sessions_per_minute, paced);
        assert_eq!(user.rules.devices, Some("clients.toml, line 14: sharing".into()));
        let exclusive = policy.grant("host2", &share(&["--sharing=exclusive"])).unwrap();
        assert_eq!(exclusive.rules.devices, Some("clients.toml, line 6: devices; --sharing".into()));
    }

    #[test]
    fn who_may_not_use_the_server_is_told_by_which_rule() {
        let refusal = policy(TEXT).unwrap().grant("thief", &share(&[])).unwrap_err();
        assert_eq!(refusal, "thief may not use this server (clients.toml, line 33: allow = false)");
        let closed = policy("allow = false\n[[client]]\nname = \"host1\"\n").unwrap();
        assert!(closed.grant("host1", &share(&[])).is_ok());
        let refusal = closed.grant("host2", &share(&[])).unwrap_err();
        assert_eq!(refusal, "host2 may not use this server (clients.toml, line 1: allow = false)");
        // Without a file, everybody may use what the options allow.
        let none = Policy::default().grant("uid:0", &share(&["--client-sessions=3"])).unwrap();
        assert_eq!((none.limits.sessions, none.data_connections), (Some(3), None));
        assert_eq!(none.rules, Rules { sessions: "--client-sessions".into(), ..Rules::default() });
    }

    #[test]
    fn leases_follow_the_most_specific_rule_which_refusals_name() {
        let text = "leases = 2\nlease_required = true\n[[client]]\nname = \"host1\"\nexclusive_leases = true\nlease_minutes = 5\nlease_required = false\n";
        let policy = policy(text).unwrap();
        let of = |name| policy.grant(name, &share(&[])).unwrap().leasing;
        let (host1, other) = (of("host1"), of("other"));
        assert_eq!((host1.most.clone(), host1.required), ((2, "clients.toml, line 1: leases".into()), None));
        assert_eq!(host1.exclusive, (true, "clients.toml, line 5: exclusive_leases".into()));
        assert_eq!(host1.seconds, (300, "clients.toml, line 6: lease_minutes".into()));
        assert_eq!(other.required, Some("clients.toml, line 2: lease_required".into()));
        assert_eq!((other.exclusive.0, other.seconds.0), (false, 86400));
        let none = Policy::default().grant("uid:0", &share(&[])).unwrap().leasing;
        assert_eq!((none.most.0, none.exclusive.0, none.required), (16, false, None));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        for (text, words) in [
            ("weight = 0\n", "line 1: weight"),
            ("\ncolour = 1\n", "line 2: colour: there is no such option"),
            ("name = \"x\"\n", "there is no such option"),
            ("[[client]]\nweight = 2\n", "line 1: client.name: is missing"),
            ("[[client]]\nname = \"a b\"\n", "is not a name"),
            ("[[client]]\nname = \"uid:root\"\n", "is not a name"),
            (
                "[[client]]\nname = \"a\"\n[[client]]\nname = \"a\"\n",
                "line 4: client.name: there is a section for a already",
            ),
            ("[[client]]\nname = \"a\"\ngroup = \"g\"\n", "line 3: client.group: there is no group g"),
            (
                "[[group]]\nname = \"g\"\ndevices = [4]\n",
                "line 3: group.devices: the server does not share device 4",
            ),
            ("[[group]]\nname = \"g\"\nallow = \"perhaps\"\n", "line 3: group.allow"),
            ("\ndevices = []\n", "line 2: devices: names no device"),
            ("[[group]]\nname = \"g\"\ndevices = []\n", "line 3: group.devices: names no device"),
            ("[[client]]\nname = \"a\"\ndevices = []\n", "line 3: client.devices: names no device"),
            ("[[client]]\nname = \"insecure:host1\"\n", "line 2: client.name: host1 is not an IP address"),
            ("[[client]\n", "line 1"),
        ] {
            let error = policy(text).unwrap_err();
            assert!(error.contains("clients.toml") && error.contains(words), "{text}: {error}");
        }
        // The server's option is for another file.
        let error = policy("[[client]]\nmax_sessions = 2\n").unwrap_err();
        assert!(error.ends_with("line 2: client.max_sessions: there is no such option"), "{error}");
    }

    #[test]
    fn the_documentation_follows_from_the_options() {
        test_kit::check_generated(concat!(env!("CARGO_MANIFEST_DIR"), "/clients.toml"), None, &example());
        let table = options::document::keys(&parts());
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");
        test_kit::check_generated(page, Some("clients"), &table);
        for text in [example(), example().replace("#: ", "")] {
            assert_eq!(policy(&text).unwrap().counts(), (1, 1));
        }
    }
}
