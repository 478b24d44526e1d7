//! Pull speed: against `curl` of the same file from the same server to the same disk.

use std::io::ErrorKind;
use std::process::{Command, Stdio};

use blobd::demo::models::{Dimensions, SyntheticModel};

use crate::Setup;
use crate::balloon::Balloon;
use crate::measure::{Daemon, Outcome, Series, gib, mib, run as run_command, timed};
use crate::server::Server;

pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    if !has_curl()? {
        println!("\npull: skipped: curl is not installed");
        return Ok(());
    }
    let directory = tempfile::tempdir_in(&setup.tmpfs)?;
    let file = directory.path().join("model.gguf");
    let dimensions = Dimensions { block_count: setup.blocks, ..Dimensions::LLAMA3_8B };
    let size = SyntheticModel::llama("bench", dimensions).write_to(&file)?;
    println!("\npull of {:.2} GiB from a server on this machine", gib(size));
    let server = Server::start(&file)?;
    let (mut curl, mut durable_curl, mut pull) = (Series::default(), Series::default(), Series::default());
    let mut peak_rss_bytes = 0;
    let _balloon = Balloon::inflate()?;
    // Kept to the end, for the reason that import's are.
    let (mut directories, mut daemons) = (Vec::new(), Vec::new());
    for _ in 0..setup.rounds {
        let directory = tempfile::tempdir_in(&setup.disk)?;
        let target = directory.path().join("copy");
        rustix::fs::sync();
        let fetched = timed(|| {
            run_command(Command::new("curl").args(CURL).arg("-o").arg(&target).arg(server.layer_url()))
        })?
        .0;
        let synced = timed(|| run_command(Command::new("sync").arg(&target)))?.0;
        curl.push(fetched);
        durable_curl.push(fetched + synced);
        let mut daemon = Daemon::start(&setup.blobd, &setup.disk)?;
        rustix::fs::sync();
        pull.push(timed(|| daemon.pull(&setup.blobd, server.model()))?.0);
        peak_rss_bytes = peak_rss_bytes.max(daemon.peak_rss_bytes()?);
        daemon.kill()?;
        directories.push(directory);
        daemons.push(daemon);
    }
    for (what, series) in
        [("curl              ", &curl), ("curl + sync       ", &durable_curl), ("blobd pull        ", &pull)]
    {
        let speed = gib(size) / series.seconds();
        println!("  disk: {what}   {:8.2} s  {speed:6.2} GiB/s", series.seconds());
    }
    println!("  speed against curl         {:8.2}    (floor 0.9)", pull.ratio(&curl));
    println!("  speed against curl + sync  {:8.2}", pull.ratio(&durable_curl));
    println!("  peak RSS of the daemon     {:8.1} MiB (limit 96)", mib(peak_rss_bytes));
    Ok(())
}

/// Silent but for errors, and past any proxy.
const CURL: [&str; 3] = ["-fsS", "--noproxy", "*"];

fn has_curl() -> Outcome<bool> {
    match Command::new("curl").arg("--version").stdout(Stdio::null()).status() {
        Ok(status) => Ok(status.success()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error.into()),
    }
}
