//! Every key of the configuration file: its name, its default, what it means, and when a change takes effect.
//!
//! `config show`, the hints of errors, `docs/CONFIGURATION.md` and the manual page all use this table.

use blobd_client::protocol::upkeep::AppliedBy;

/// A key of the configuration file.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// With its section, such as `space.quota`.
    pub name: &'static str,
    /// In Markdown: a value of TOML in backticks, or words.
    pub default: &'static str,
    /// In Markdown; links are relative to `docs/`.
    pub meaning: &'static str,
    pub(super) applied_by: AppliedBy,
}

impl Key {
    /// Whether a change takes effect only after a restart of the daemon.
    #[must_use]
    pub fn needs_restart(self) -> bool {
        self.applied_by == AppliedBy::Restart
    }
}

/// A key whose changes SIGHUP applies.
const fn key(name: &'static str, default: &'static str, meaning: &'static str) -> Key {
    Key { name, default, meaning, applied_by: AppliedBy::Reload }
}

/// A key whose changes take effect after a restart of the daemon: it has the store and the socket open, and their users
/// rely on what it knows of them.
const fn fixed(name: &'static str, default: &'static str, meaning: &'static str) -> Key {
    Key { name, default, meaning, applied_by: AppliedBy::Restart }
}

/// All keys, in the order in which they are printed.
#[rustfmt::skip]
pub const KEYS: &[Key] = &[
    fixed("root", "`/var/lib/blobd` for root, else `$XDG_DATA_HOME/blobd` ([where things are](INSTALL.md#where-things-are))",
        "the store's directory"),
    fixed("lower", "`[]`",
        "directories of read-only stores, each listed once, searched in this order for what the store lacks ([several stores](OPERATIONS.md#several-stores))"),
    fixed("socket", "`/run/blobd/blobd.sock` for root, else `$XDG_RUNTIME_DIR/blobd/blobd.sock`",
        "the daemon's socket"),
    fixed("socket_group", "for root the group blobd if there is one, else none",
        "the group whose members may connect: its name or its number"),
    fixed("socket_mode", r#"`"0660"` with a group, else `"0600"`"#,
        "the socket's permissions; whoever may write to it may connect"),
    key("mirrors", "none",
        "a table: a registry's host, and the base URL to use in its place, or a list of them; requests to `/v2/` of a mirror say the host (`?ns=HOST`); a URL has no user and no password: `blobd login` saves them"),
    key("peers.urls", "none",
        "base URLs of machines that are asked first for files whose digests are known, such as other blobds that [serve](SERVING.md) their models; a URL has no user and no password"),
    key("headers", "none",
        "a table: the base URL of a mirror, a peer or another server, and a table of headers that are added to each request to that host and port ([example](PULLING.md#mirrors)); `blobd config` shows them"),
    key("insecure_registries", "none",
        "registries, as `HOST` or `HOST:PORT`, that are contacted over plain HTTP"),
    key("ca_files", "none",
        "PEM files with certificate authorities to trust in addition to the system's"),
    fixed("durability", r#"`"auto"`"#,
        r#"how the content of new blobs is made durable: `"auto"`, `"fsync"`, `"syncfs"`"#),
    fixed("single_user", "`true`, but `false` for root and if `socket_group` or `socket_mode` admit others",
        "whether clients are expected to run as the daemon's own user"),
    key("trust", "none",
        "a list of rules: which models must be signed, and by whom ([signatures](OPERATIONS.md#which-models-must-be-signed))"),
    key("access.read", r#"`["*"]`"#,
        "the users who may list and open models ([who may do what](USERS.md#who-may-do-what))"),
    key("access.pull", "as for reading",
        "the users who may also add models"),
    key("access.admin", r#"`["@blobd-admin"]`"#,
        "the users who may do everything"),
    key("access.root", r#"`"administer"`"#,
        r#"what root may do: everything, `"host"`: only outside of other containers and namespaces, `"user"`: what the lists say ([root of containers](USERS.md#root-of-containers))"#),
    key("quotas.default", "`{}`",
        "the limits of each user: `soft` and `hard`, sizes ([quotas of users](USERS.md#quotas-of-users))"),
    key("quotas.users", "none",
        "a table: a user's name or number, and the limits of that user"),
    key("quotas.groups", "none",
        "a table: a group's name or number, and the limits: `soft` and `hard` of each of its members, `together` of all members"),
    key("policy.default", r#"`"allow"`"#,
        "what happens to models that no rule applies to ([which models are allowed](USERS.md#which-models-are-allowed))"),
    key("policy.rules", "none",
        "rules that allow and deny models"),
    key("space.quota", "none",
        "the most disk space that the store may use"),
    key("space.min_free", "2 % of the file system, 1 GiB at most",
        "how much of the file system must stay free for other programs"),
    key("space.evict", r#"`"never"`"#,
        r#"which models may be evicted to free space: `"never"`, `"pullable"`, `"all"`"#),
    key("space.high_watermark", "`95`",
        "eviction starts above this percentage of the quota …"),
    key("space.low_watermark", "`85`",
        "… and stops below this one"),
    key("trash.displaced", "`7`",
        "how long the [trash](OPERATIONS.md#the-trash) keeps a model whose name was given to other content; 0 keeps none"),
    key("scrub.rate_bytes_per_second", r#"`"50 MiB"`"#,
        "how fast the daemon reads to verify what is stored; 0 turns this off"),
    key("scrub.pass_days", "`30`",
        "days from the start of one complete verification to the start of the next"),
    key("scrub.pause_above_pressure_percent", "`30`",
        "verification pauses while tasks wait for disks for more than this percentage of the time"),
    fixed("audit.enabled", "`true`",
        "whether there is an [audit log](USERS.md#the-audit-log)"),
    fixed("audit.directory", "in the store",
        "where its files are; the parent directory must exist"),
    fixed("audit.max_bytes", r#"`"16 MiB"`"#,
        "the maximum size of a file, 64 KiB to 1 GiB; an eighth of the whole log if `audit.keep` is less than 8"),
    fixed("audit.keep", "`10`",
        "the maximum size of the log, as a number of files of `audit.max_bytes`; at least 2"),
    fixed("audit.journal", "`false`",
        "whether each record is also sent to systemd's journal, with its keys as fields"),
    key("transfer.limit_rate", "none",
        "the rate limit per second of all pulls, pushes and transfers together"),
    key("transfer.max_connections", "`8`",
        "the most connections to one host, of all pulls together, 1 to 64"),
    key("transfer.stall_timeout_seconds", "`15`",
        "after how many seconds without a byte a connection for a file is given up, 1 to 600"),
    fixed("metrics.listen", "none",
        r#"a loopback address, such as `"127.0.0.1:9750"`, on which every user can read metrics and health ([monitoring](OPERATIONS.md#monitoring))"#),
    fixed("serve.listen", "none",
        r#"an address, such as `"127.0.0.1:5000"`, on which other machines can read models ([models for other machines](SERVING.md))"#),
    key("serve.hub", "`false`",
        "whether clients of Hugging Face's hub are served too ([the hub's API](SERVING.md#the-hubs-api))"),
    key("serve.models", r#"`["*"]`"#,
        "the models that they see: names and patterns of names ([what is shown](SERVING.md#what-is-shown))"),
    key("serve.user", "none: they see what every user may read",
        "a user of this machine: they see what this user may read"),
    key("serve.certificate", "none",
        "a PEM file with the chain of certificates: clients then need https; read again at SIGHUP"),
    key("serve.key", "none",
        "a PEM file with the certificate's private key, which others cannot read"),
    key("serve.tokens", "none: everybody who reaches the port is served",
        "a file with lines `NAME:TOKEN`, for those who are served ([who is served](SERVING.md#who-is-served))"),
    key("serve.upstream", "`[]`: only stored models are served",
        "hosts of registries, such as `registry.ollama.ai`, from which models are pulled that are requested and not stored ([pulling through](SERVING.md#pulling-through))"),
    key("serve.upstream_user", "the daemon's own user",
        "a user of this machine, in whose name and quota they are pulled"),
    key("serve.hosts", "`[]`",
        "names of this machine that requests may have, besides its addresses"),
    fixed("serve.max_connections", "`256`",
        "the most connections of other machines at a time, 1 to 4096"),
    fixed("serve.max_connections_per_client", "`64`",
        "the most connections of one address at a time"),
    key("credentials.file", "credentials.json beside this file",
        "the file that `blobd login` writes"),
    key("credentials.use_docker_helpers", "`false`",
        "whether to run the credential helpers that Docker's configuration names"),
    key("credentials.insecure_hosts", "none",
        "hosts, as `HOST:PORT`, that may get credentials over plain HTTP"),
    key("credentials.ollama_key_hosts", "none",
        "mirrors of registry.ollama.ai for which Ollama's key may sign"),
    key("credentials.token_services", "none",
        "a table: a registry's host, and the host of its token service"),
];

/// The keys of a rule in `policy.rules` or `trust`.
const RULE_KEYS: [&str; 12] = [
    "policy.rules.action",
    "policy.rules.registry",
    "policy.rules.name",
    "policy.rules.license",
    "policy.rules.format",
    "policy.rules.users",
    "policy.rules.except",
    "policy.rules.reason",
    "trust.pattern",
    "trust.keys",
    "trust.mode",
    "trust.partial",
];

pub(super) fn is_section(name: &str) -> bool {
    KEYS.iter().any(|key| key.name.split_once('.').is_some_and(|(section, _)| section == name))
}

/// The names of keys, keys of rules, and sections in brackets.
pub(super) fn names() -> Vec<String> {
    let mut sections: Vec<&str> =
        KEYS.iter().filter_map(|key| key.name.split_once('.')).map(|(section, _)| section).collect();
    sections.dedup();
    let names = KEYS.iter().map(|key| key.name).chain(RULE_KEYS).map(str::to_owned);
    names.chain(sections.into_iter().map(|section| format!("[{section}]"))).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::{env, fs};

    use serde_json::{Value, json};

    use super::super::Config;
    use super::*;

    impl Key {
        /// The lines that set the key to a value.
        fn set_to(self, value: &str) -> String {
            match self.name.split_once('.') {
                Some((section, name)) => format!("[{section}]\n{name} = {value}"),
                None => format!("{} = {value}", self.name),
            }
        }

        fn row(self) -> String {
            let restart = if self.needs_restart() { "; needs a restart" } else { "" };
            format!("| `{}` | {} | {}{restart} |\n", self.name, self.default, self.meaning)
        }
    }

    /// `BLESS=1` writes the table.
    #[test]
    fn documentation_has_the_same_table() {
        const HEAD: &str = "| key | default | meaning |\n|---|---|---|\n";
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/CONFIGURATION.md");
        let text = fs::read_to_string(&path).unwrap();
        let (before, table) = text.split_once(HEAD).expect("the table of keys");
        let (_, after) = table.split_once("\n\n").expect("text below the table");
        let rows: String = KEYS.iter().map(|key| key.row()).collect();
        let wanted = format!("{before}{HEAD}{rows}\n{after}");
        if env::var_os("BLESS").is_some() {
            fs::write(&path, &wanted).unwrap();
        } else {
            assert!(text == wanted, "the table of keys differs: run this test with BLESS=1");
        }
    }

    #[test]
    fn keys_are_known_to_the_parser_in_their_sections() {
        for key in KEYS {
            let error = Config::parse(Path::new("c"), &key.set_to("1.5")).unwrap_err().to_string();
            assert!(error.contains("expected") && !error.contains("unknown"), "{error}");
        }
    }

    /// The settings of a file, by key.
    fn value_of(key: Key, text: &str) -> Value {
        let settings = Config::parse(Path::new("c"), text).unwrap().settings(&Default::default()).settings;
        settings
            .into_iter()
            .find(|setting| setting.key == key.name)
            .map_or(json!(null), |setting| setting.value)
    }

    #[test]
    fn defaults_of_the_table_are_those_of_the_program() {
        let mut compared = 0;
        for key in KEYS {
            let literal = key.default.strip_prefix('`').and_then(|rest| rest.strip_suffix('`'));
            let Some(literal) = literal.filter(|literal| !literal.contains('`')) else { continue };
            assert_eq!(value_of(*key, ""), value_of(*key, &key.set_to(literal)), "{}", key.name);
            compared += 1;
        }
        assert!(compared > 15, "{compared}");
    }
}
