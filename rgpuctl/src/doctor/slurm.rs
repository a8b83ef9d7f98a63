//! Checks what a node of Slurm needs to lease GPUs for its jobs (docs/slurm.md), if rgpu's script for that is
//! installed.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::{Args, FromArgMatches};
use host_bridge::ask::{Answer, Question};
use host_bridge::framing::with_causes;
use host_bridge::server::Server;

use super::Finding::{self, Good, Note, Wrong};
use super::output;
use crate::pool::Place;

/// Prolog, Epilog and TaskProlog of the node.
const SCRIPT: &str = "/usr/lib/rgpu/rgpu-slurm";
/// Its settings.
const SETTINGS: &str = "/etc/rgpu/slurm.conf";
const TIMER: &str = "rgpu-slurm.timer";
/// How often the timer renews leases, in minutes.
const RENEWED_EACH: u64 = 2;
/// How many seconds a Prolog may take beyond WAIT: its last questions to slurmctld, 25, and to servers.
const BEYOND_WAIT: u64 = 30;
/// Maximum number of jobs without GPUs that are reported.
const JOBS: usize = 3;

/// The script's settings.
#[derive(Debug, PartialEq)]
struct Settings {
    state: PathBuf,
    pool: PathBuf,
    /// Options of rgpuctl.
    options: String,
    minutes: u64,
    wait: u64,
}

/// Runs the checks. Returns nothing on machines without the script.
pub fn check() -> Vec<Finding> {
    if !Path::new(SCRIPT).exists() {
        return Vec::new();
    }
    let said = output(&[SCRIPT, "settings"]);
    let settings = match said.as_deref().map(parse) {
        Ok(Some(settings)) => settings,
        Ok(None) => return vec![unusable("a setting is missing, or MINUTES or WAIT is no number")],
        Err(error) => return vec![unusable(error)],
    };
    let mut findings = vec![timer(&settings, output(&["systemctl", "is-active", TIMER]).as_deref())];
    findings.extend(minutes(&settings));
    findings.extend(readable(Path::new(SETTINGS)));
    match output(&["scontrol", "show", "config"]) {
        Ok(text) => findings.extend(configuration(&text, &settings)),
        Err(error) => findings.push(Note(format!("Slurm's configuration is unknown: {error}"), None)),
    }
    findings.extend(pool(&settings));
    findings.extend(socket(Path::new(protocol::native::DEFAULT_SOCKET)));
    findings.extend(without_gpus(&settings.state));
    findings
}

fn unusable(why: &str) -> Finding {
    Wrong(
        format!("the settings of {SCRIPT} cannot be read: {why}"),
        "correct /etc/rgpu/slurm.conf, which is a piece of shell; docs/slurm.md lists what it may set".into(),
    )
}

fn parse(text: &str) -> Option<Settings> {
    let value = |name: &str| {
        text.lines()
            .find_map(|line| line.split_once('=').filter(|(key, _)| *key == name))
            .map(|(_, value)| value)
    };
    Some(Settings {
        state: value("STATE")?.into(),
        pool: value("POOL")?.into(),
        options: value("OPTIONS")?.to_owned(),
        minutes: value("MINUTES")?.parse().ok()?,
        wait: value("WAIT")?.parse().ok()?,
    })
}

/// `active`: what systemctl reports about the timer.
fn timer(settings: &Settings, active: Result<&str, &String>) -> Finding {
    match active {
        Ok(_) => Good(format!("{TIMER} renews the leases of Slurm's jobs")),
        Err(why) => Wrong(
            format!(
                "{TIMER} does not run ({why}): jobs lose their GPUs {} minutes after they began",
                settings.minutes
            ),
            format!("systemctl enable --now {TIMER}"),
        ),
    }
}

fn minutes(settings: &Settings) -> Option<Finding> {
    (settings.minutes < 2 * RENEWED_EACH).then(|| {
        Wrong(
            format!(
                "MINUTES={} in /etc/rgpu/slurm.conf: a lease ends if it is renewed once too late, each {RENEWED_EACH} minutes",
                settings.minutes
            ),
            "set MINUTES to 5 or more".into(),
        )
    })
}

/// Whether tasks of all users can read the settings.
fn readable(path: &Path) -> Option<Finding> {
    // There need not be any.
    let mode = fs::metadata(path).ok()?.permissions().mode();
    (mode & 0o004 == 0).then(|| {
        let shown = path.display();
        Wrong(
            format!(
                "{shown} has the mode {:o}: TaskProlog reads it as the job's user, and all tasks fail",
                mode & 0o777
            ),
            format!("chmod 644 {shown}; what is secret belongs in files that it names"),
        )
    })
}

/// Checks the output of `scontrol show config`.
fn configuration(text: &str, settings: &Settings) -> Vec<Finding> {
    // Newer versions number the scripts: Prolog[0].
    let value = |name: &str| {
        text.lines().find_map(|line| {
            let (key, value) = line.split_once('=')?;
            (key.trim().split('[').next()? == name).then(|| value.trim())
        })
    };
    let lists = |name: &str, wanted: &str| {
        value(name).is_some_and(|list| list.split(',').any(|word| word.trim().eq_ignore_ascii_case(wanted)))
    };
    let mut findings = Vec::new();
    if !lists("GresTypes", "rgpu") {
        findings.push(Wrong(
            format!("Slurm knows no GRES rgpu: GresTypes is {}", value("GresTypes").unwrap_or("not set")),
            "GresTypes=rgpu,rgpumem in slurm.conf, counts in gres.conf and at NodeName, then restart slurmctld and slurmd".into(),
        ));
    }
    for name in ["Prolog", "Epilog", "TaskProlog"] {
        let what = match name {
            "Prolog" => "jobs get no lease",
            "Epilog" => "leases stay until the timer finds that their job is over",
            _ => "jobs do not find their lease",
        };
        let script = value(name).filter(|script| *script != "(null)");
        match script {
            Some(script) if script.contains("rgpu-slurm") => {}
            Some(script) => findings.push(Note(
                format!("Slurm's {name} is {script}: unless that calls rgpu-slurm, {what}"),
                Some(format!("call {SCRIPT} from it, with the same environment")),
            )),
            None => findings.push(Wrong(
                format!("Slurm has no {name}: {what}"),
                format!("{name}={SCRIPT} in slurm.conf, then scontrol reconfigure"),
            )),
        }
    }
    if !lists("PrologFlags", "Alloc") {
        findings.push(Note(
            "PrologFlags lacks Alloc: a job of several nodes begins before all of them have their lease"
                .into(),
            Some("PrologFlags=Alloc in slurm.conf, then restart slurmctld and slurmd".into()),
        ));
    }
    if value("SelectType").is_some_and(|plugin| plugin == "select/linear") {
        findings.push(Note(
            "with SelectType=select/linear, Slurm does not account for the GRES of jobs, each of which has whole nodes"
                .into(),
            Some("SelectType=select/cons_tres in slurm.conf, before there are jobs: slurmctld loses them".into()),
        ));
    }
    // 65534: no limit.
    let limit = ["PrologEpilogTimeout", "PrologTimeout"].iter().find_map(|name| value(name));
    let limit = limit.and_then(|limit| limit.split_whitespace().next()?.parse::<u64>().ok());
    let longest = settings.wait.saturating_add(BEYOND_WAIT);
    if let Some(limit) = limit.filter(|limit| *limit <= longest) {
        findings.push(Wrong(
            format!(
                "slurmd ends a Prolog after {limit} s and drains the node, and one may take {longest} s (WAIT={})",
                settings.wait
            ),
            format!(
                "set PrologEpilogTimeout in slurm.conf to more than {longest}, or WAIT in /etc/rgpu/slurm.conf to less"
            ),
        ));
    }
    if findings.is_empty() {
        findings
            .push(Good("Slurm's configuration has the GRES rgpu, and runs rgpu-slurm for each job".into()));
    }
    findings
}

/// The pool, and how the script asks its servers.
fn place(settings: &Settings) -> Result<Place, String> {
    let wrong = |error: clap::Error| {
        let text = error.to_string();
        format!("OPTIONS: {}", text.lines().next().unwrap_or_default().trim_start_matches("error: "))
    };
    // As the shell would split them.
    let words = settings.options.split_whitespace();
    let command = Place::augment_args(clap::Command::new("OPTIONS").no_binary_name(true));
    let place = command.try_get_matches_from(words).and_then(|given| Place::from_arg_matches(&given));
    Ok(Place { servers: Vec::new(), pool: Some(settings.pool.clone()), ..place.map_err(wrong)? })
}

/// Whether the pool's servers can be asked with this machine's key, and whether vhost-rgpu knows them.
fn pool(settings: &Settings) -> Vec<Finding> {
    let place = match place(settings) {
        Ok(place) => place,
        Err(error) => return vec![unusable(&error)],
    };
    let members = match place.members() {
        Ok(members) => members,
        Err(error) => {
            let step =
                format!("list the servers in {}: servers = [\"gpu1\", \"gpu2\"]", settings.pool.display());
            // Omits the first part, which is about a command line.
            let why: Vec<String> = error.chain().skip(1).map(ToString::to_string).collect();
            return vec![Wrong(format!("Slurm's jobs have no pool of servers: {}", why.join(": ")), step)];
        }
    };
    let mut findings = Vec::new();
    if nix::unistd::geteuid().is_root() {
        let mut there = Some(0);
        for (server, answer) in members.iter().zip(place.asker().ask_all(&members, &Question::Inventory {})) {
            findings.push(match answer {
                Ok(Answer::Inventory(gpus)) => {
                    there = there.map(|there| there + gpus.len() as u64);
                    Good(format!("{server} has {} GPUs for jobs", gpus.len()))
                }
                Ok(_) => {
                    there = None;
                    Wrong(
                        format!("{server} does not answer with its inventory"),
                        "upgrade rgpu-server there".into(),
                    )
                }
                Err(error) => {
                    there = None;
                    Wrong(
                        format!("no job gets a GPU of {server}: {}", with_causes(&error)),
                        "start rgpu-server there; if it does not know this node: rgpuctl enroll NAME there, and here, as root, what that prints".into(),
                    )
                }
            });
        }
        if let (Some(there), Ok(nodes)) = (there, output(&["sinfo", "-h", "-a", "-N", "-o", "%N %G"])) {
            findings.extend(too_many(counted(&nodes), there));
        }
    } else {
        let step = "run rgpuctl doctor as root";
        findings
            .push(Note("only root has the key with which jobs' leases are taken".into(), Some(step.into())));
    }
    let file = Path::new("/etc/rgpu/vhost-rgpu.toml");
    match fs::read_to_string(file) {
        Ok(text) => findings.extend(unknown(&members, &text)),
        Err(error) => findings.push(Note(format!("{} cannot be read: {error}", file.display()), None)),
    }
    findings
}

/// How many GRES rgpu Slurm counts on all nodes: `nodes` has a line for each node and partition, with the
/// node's name and GRES.
fn counted(nodes: &str) -> u64 {
    let nodes: BTreeMap<&str, &str> = nodes.lines().filter_map(|line| line.split_once(' ')).collect();
    let gres = nodes.values().flat_map(|gres| gres.split(','));
    let rgpu = gres.filter_map(|gres| gres.strip_prefix("rgpu:")?.split('(').next()?.rsplit(':').next());
    rgpu.filter_map(|count| count.parse::<u64>().ok()).sum()
}

/// Nodes do not know that they share the pool, so the operator has to divide it among them.
fn too_many(counted: u64, there: u64) -> Option<Finding> {
    (counted > there).then(|| {
        Note(
            format!(
                "Slurm counts {counted} GPUs (GRES rgpu) on all nodes, and the pool has {there}: jobs that find none go back into the queue"
            ),
            Some(format!(
                "unless jobs share GPUs (rgpumem), divide the {there} among the nodes: Gres in slurm.conf, and gres.conf"
            )),
        )
    })
}

/// The pool's servers that vhost-rgpu's configuration does not name: it would refuse leases there.
fn unknown(members: &[Server], configuration: &str) -> Option<Finding> {
    // The daemon reports errors in the file when it starts.
    let table: toml::Table = configuration.parse().ok()?;
    let native = table.get("native").and_then(toml::Value::as_table);
    let texts = |value: Option<&toml::Value>| -> Vec<String> {
        match value {
            Some(toml::Value::String(text)) => vec![text.clone()],
            Some(toml::Value::Array(all)) => {
                all.iter().filter_map(toml::Value::as_str).map(str::to_owned).collect()
            }
            _ => Vec::new(),
        }
    };
    // A section without a server uses the file's.
    let server = native.and_then(|native| native.get("server")).or(table.get("server"));
    let named = native.and_then(|native| native.get("named_servers"));
    let known: Vec<Server> =
        [texts(server), texts(named)].concat().iter().filter_map(|text| text.parse().ok()).collect();
    let missing: Vec<String> = members
        .iter()
        .filter(|member| !known.iter().any(|known| known.address == member.address))
        .map(ToString::to_string)
        .collect();
    (!missing.is_empty()).then(|| {
        Wrong(
            format!("vhost-rgpu does not know {}: jobs with GPUs there have no sessions", missing.join(", ")),
            "add them to named_servers in [native] of /etc/rgpu/vhost-rgpu.toml, then systemctl reload vhost-rgpu".into(),
        )
    })
}

/// Whether jobs of all users can reach vhost-rgpu.
fn socket(path: &Path) -> Option<Finding> {
    // Another check reports a missing socket.
    let mode = fs::metadata(path).ok()?.permissions().mode();
    (mode & 0o006 != 0o006).then(|| {
        Note(
            format!(
                "{} has the mode {:o}: only jobs of its owner and its group can use GPUs",
                path.display(),
                mode & 0o777
            ),
            Some(
                "add users to its group (rgpu), here and where slurmctld runs, or systemctl edit vhost-rgpu.socket, set SocketMode=0666 in [Socket], and systemctl restart vhost-rgpu.socket, which ends sessions"
                    .into(),
            ),
        )
    })
}

/// Jobs of this node that asked for GPUs and got none, with the reasons.
fn without_gpus(state: &Path) -> Vec<Finding> {
    let mut found = Vec::new();
    for entry in fs::read_dir(state).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(job) = name.strip_suffix(".why").and_then(|name| name.split('.').next()) else { continue };
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        let why = text.lines().last().unwrap_or("the reason is unknown").to_owned();
        let (never, started) = match text.lines().next() {
            Some("never") => (true, false),
            Some("started") => (false, true),
            Some("never started") => (true, true),
            _ => (false, false),
        };
        let what = if never { "can never have its GPUs" } else { "has found no GPUs" };
        let step = match (never, started) {
            (true, false) => format!(
                "it is held; change it (scontrol update JobId={job} Gres=…), the servers or their clients.toml, then scontrol release {job}"
            ),
            (true, true) => "Slurm holds only batch jobs without --no-requeue: unless another of its nodes has had it held, its tasks have failed; change the servers, their clients.toml or what it asks for, and start it again".to_owned(),
            (false, true) => "Slurm puts back only batch jobs without --no-requeue: unless another of its nodes has had it put back, its tasks have failed; start it again once rgpuctl inventory shows enough that is free".to_owned(),
            (false, false) => "it is in the queue again; rgpuctl inventory shows what is free, and the server's clients.toml what this node may lease (exclusive_leases, leases)".to_owned(),
        };
        found.push((job.parse::<u64>().unwrap_or(0), format!("job {job} {what}: {why}"), step));
    }
    found.sort();
    found.into_iter().rev().take(JOBS).map(|(_, text, step)| Note(text, Some(step))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: &str =
        "STATE=/run/x\nPOOL=/etc/p.toml\nOPTIONS=--insecure\nMINUTES=10\nWAIT=60\nLIBRARIES=/usr/lib/rgpu\n";

    #[test]
    fn the_settings_are_those_that_the_script_prints() {
        let script =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/rgpu-slurm/files/usr/lib/rgpu/rgpu-slurm");
        let settings = parse(&output(&["sh", script, "settings"]).unwrap()).unwrap();
        assert_eq!(settings.pool, Path::new("/etc/rgpu/pool.toml"));
        assert_eq!((settings.minutes, settings.options.as_str()), (10, ""));
        assert_eq!(parse(SETTINGS).unwrap().options, "--insecure");
        assert_eq!(parse("STATE=/run/x\n"), None);
    }

    #[test]
    fn servers_are_asked_with_the_scripts_options() {
        let with = |options: &str| {
            let text = format!("STATE=/s\nPOOL=/p\nOPTIONS={options}\nMINUTES=10\nWAIT=60\n");
            place(&parse(&text).unwrap())
        };
        let none = with("").unwrap();
        assert!(!none.insecure && none.identity.is_none() && none.pool == Some("/p".into()));
        let both = with("--insecure --identity /etc/rgpu/slurm-key").unwrap();
        assert!(both.insecure && both.identity == Some("/etc/rgpu/slurm-key".into()));
        let wrong = with("--unsafe").err().unwrap();
        assert!(wrong.starts_with("OPTIONS: unexpected argument '--unsafe'"), "{wrong}");
    }

    #[test]
    fn settings_that_not_all_users_can_read_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("slurm.conf");
        assert_eq!(readable(&path), None);
        fs::write(&path, "WAIT=60\n").unwrap();
        for (mode, good) in [(0o600, false), (0o640, false), (0o644, true)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(readable(&path).is_none(), good, "{mode:o}");
        }
    }

    #[test]
    fn leases_that_nobody_renews_are_reported() {
        let settings = Settings { minutes: 3, ..parse(SETTINGS).unwrap() };
        assert!(matches!(minutes(&settings), Some(Wrong(text, _)) if text.contains("MINUTES=3")));
        assert_eq!(minutes(&parse(SETTINGS).unwrap()), None);
        let stopped = timer(&settings, Err(&"inactive".to_owned()));
        assert!(matches!(stopped, Wrong(text, _) if text.contains("inactive") && text.contains("3 minutes")));
        assert!(matches!(timer(&settings, Ok("active")), Good(_)));
    }

    #[test]
    fn missing_settings_of_slurm_are_named() {
        let whole = "GresTypes               = gpu,rgpu,rgpumem\nProlog[0]               = /usr/lib/rgpu/rgpu-slurm\nEpilog                  = /usr/lib/rgpu/rgpu-slurm\nTaskProlog = /usr/lib/rgpu/rgpu-slurm\nPrologFlags             = Alloc,Contain\nSelectType              = select/cons_tres\n";
        let settings = parse(SETTINGS).unwrap();
        let configuration = |text: &str| configuration(text, &settings);
        assert!(matches!(&configuration(whole)[..], [Good(_)]));
        let changed = whole
            .replace("rgpu,rgpumem", "x")
            .replace("Epilog                  = /usr/lib/rgpu/rgpu-slurm", "Epilog = (null)");
        let changed = changed
            .replace("Prolog[0]               = /usr/lib/rgpu/rgpu-slurm", "Prolog = /opt/own")
            .replace("Alloc,", "")
            .replace("cons_tres", "linear");
        let found = configuration(&changed);
        assert_eq!(found.len(), 5, "{found:?}");
        assert!(matches!(&found[0], Wrong(text, _) if text.ends_with("GresTypes is gpu,x")), "{found:?}");
        assert!(matches!(&found[1], Note(text, _) if text.contains("/opt/own")), "{found:?}");
        assert!(matches!(&found[2], Wrong(text, _) if text.starts_with("Slurm has no Epilog")), "{found:?}");
        assert!(matches!(&found[3], Note(text, _) if text.contains("Alloc")), "{found:?}");
        assert!(matches!(&found[4], Note(text, _) if text.contains("select/linear")), "{found:?}");
    }

    #[test]
    fn a_prolog_that_slurmd_ends_while_it_waits_for_gpus_is_reported() {
        let text = |limit: &str| {
            let script = "/usr/lib/rgpu/rgpu-slurm";
            format!(
                "GresTypes = rgpu\nProlog = {script}\nEpilog = {script}\nTaskProlog = {script}\nPrologFlags = Alloc\n{limit}\n"
            )
        };
        let settings = parse(SETTINGS).unwrap();
        for good in ["", "PrologEpilogTimeout     = 65534", "PrologEpilogTimeout = 91"] {
            assert!(matches!(&configuration(&text(good), &settings)[..], [Good(_)]), "{good}");
        }
        for wrong in ["PrologEpilogTimeout     = 90", "PrologTimeout = 60 sec"] {
            let found = configuration(&text(wrong), &settings);
            assert!(matches!(&found[..], [Wrong(text, _)] if text.contains("90 s (WAIT=60)")), "{found:?}");
        }
    }

    #[test]
    fn more_gpus_than_the_pool_has_are_reported() {
        // In two partitions, n1 has two lines.
        let nodes = "n1 rgpu:4,rgpumem:4G\nn1 rgpu:4,rgpumem:4G\nn2 gpu:8,rgpu:h100:2(S:0-1),rgpu:a100:1\nn3 (null)\n";
        assert_eq!(counted(nodes), 7);
        assert_eq!(too_many(7, 7), None);
        assert!(
            matches!(too_many(7, 4), Some(Note(text, _)) if text.contains("counts 7") && text.contains("has 4"))
        );
    }

    #[test]
    fn servers_that_only_the_pool_has_are_named() {
        let members: Vec<Server> = ["gpu1", "gpu2:9701"].map(|text| text.parse().unwrap()).into();
        let known = "[native]\nserver = \"tcp:gpu1\"\nnamed_servers = [\"gpu2:9701/0\"]\n";
        assert_eq!(unknown(&members, known), None);
        let found = unknown(&members, "server = \"gpu1\"\n[native]\nmode = \"0o666\"\n");
        assert!(
            matches!(&found, Some(Wrong(text, _)) if text.contains("gpu2:9701") && !text.contains("gpu1")),
            "{found:?}"
        );
    }

    #[test]
    fn jobs_without_gpus_are_reported_newest_first() {
        let folder = tempfile::tempdir().unwrap();
        for job in [7, 12, 9, 11] {
            fs::write(folder.path().join(format!("{job}.n1.why")), format!("asking\ntoo few: {job}\n"))
                .unwrap();
        }
        fs::write(folder.path().join("13.n1"), "tcp:gpu1:9700#key\n").unwrap();
        let found = without_gpus(folder.path());
        assert_eq!(found.len(), JOBS);
        assert!(
            matches!(&found[0], Note(text, _) if text == "job 12 has found no GPUs: too few: 12"),
            "{found:?}"
        );
        // What is held is not said to be in the queue.
        fs::write(folder.path().join("14.n1.why"), "never\n1 GPU (h200) can never be had\n").unwrap();
        let found = without_gpus(folder.path());
        assert!(
            matches!(&found[0], Note(text, Some(step)) if text == "job 14 can never have its GPUs: 1 GPU (h200) can never be had" && step.contains("scontrol release 14")),
            "{found:?}"
        );
        // Nor is one that Slurm has let start.
        for (job, words, is) in [(15, "never started", "can never have"), (16, "started", "has found no")] {
            let said = format!("{words}\n1 GPU (h200): no\n");
            fs::write(folder.path().join(format!("{job}.n1.why")), said).unwrap();
            let found = without_gpus(folder.path());
            assert!(
                matches!(&found[0], Note(text, Some(step)) if text.contains(is) && step.contains("its tasks have failed") && !step.contains("it is held") && !step.contains("in the queue again")),
                "{found:?}"
            );
        }
        assert_eq!(without_gpus(Path::new("/nonexistent")), []);
    }

    #[test]
    fn a_socket_that_not_all_users_can_use_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("native.sock");
        assert_eq!(socket(&path), None);
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o660)).unwrap();
        assert!(matches!(socket(&path), Some(Note(text, _)) if text.contains("660")));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(socket(&path), None);
    }
}
