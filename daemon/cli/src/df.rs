//! `blobd df`

use blobd_cli_common::Global;
use blobd_cli_common::connect::show;
use blobd_cli_common::output::{Table, counted, human_bytes, or_dash, printable, terminal_width};
use blobd_cli_common::table::cut::NameCutter;
use blobd_cli_common::times::relative;
use blobd_client::protocol::naming::TrashedModel;
use blobd_client::protocol::space::{DiskUsage, ModelUsage, SharedWith, UsageKind, UsageRow, UserId};
use blobd_store_format::size::{human_difference, limit_bytes};
use blobd_store_format::text::one_line;
use clap::Args;
use serde::Serialize;

use crate::{Client, Digest, ErrorBody};

mod users;

/// Show what the store takes on disk, and how much sharing saves
#[derive(Debug, Args)]
#[command(
    after_help = "The rows add up to the total, which is what `du` reports for the store's directory: allocated
blocks, each file once. The row of a model is what only this model needs. What several models need
is one row, `shared`. Parts that take no space are left out; --json has all, in `rows`.

Examples:
  blobd df
  blobd df -v                                  who shares what, and who opened what last
  blobd df --users                             what is charged to each user, and the quotas
  blobd df --json | jq .saved_bytes
  blobd df --json | jq -r '.rows[] | [.bytes, .kind, .name] | @tsv'"
)]
pub(super) struct Params {
    /// Show what is charged to each user, and the quotas; only administrators see other users
    #[arg(long)]
    users: bool,
}

/// The most models that are listed without `-v`; smaller ones share one row.
const MAX_MODELS: usize = 10;

/// The most names in a list of JSON: the daemon's limit.
const MAX_NAMES: u32 = 1000;

#[derive(Debug, Serialize)]
struct Document {
    #[serde(flatten)]
    usage: DiskUsage,
    trash: Vec<TrashedModel>,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    if params.users {
        return show(global, Client::user_usage, |usage| users::render(usage, terminal_width()));
    }
    if !global.verbose && !global.json {
        return show(global, Client::disk_usage, |usage| summary(usage, MAX_MODELS));
    }
    let request = |client: &Client| {
        let usage = client.disk_usage_in_detail(MAX_NAMES)?;
        Ok(Document { usage, trash: client.trash()?.models })
    };
    show(global, request, |document| {
        summary(&document.usage, usize::MAX) + &details(document, terminal_width())
    })
}

/// The largest `most` models have rows of their own.
fn summary(usage: &DiskUsage, most: usize) -> String {
    let mut text = parts(usage, most).render(terminal_width());
    text.extend(notes(usage).map(|note| printable(&note) + "\n"));
    text.push('\n');
    text.extend(limits(usage).into_iter().map(|line| line + "\n"));
    text
}

/// The tables of `-v`. Empty ones are left out.
fn details(document: &Document, width: usize) -> String {
    let usage = &document.usage;
    let tables = [
        models(usage, width),
        shared_parts(usage),
        downloads(usage),
        trash(&document.trash),
        quarantine(usage),
    ];
    let shown = tables.iter().filter(|table| table.has_rows());
    shown.map(|table| format!("\n{}", table.render(width))).collect()
}

fn parts(usage: &DiskUsage, most: usize) -> Table {
    let mut table = Table::new(&["WHAT", "SIZE", ""], &[1]);
    let (models, others): (Vec<_>, Vec<_>) = usage.rows.iter().partition(|row| row.kind == UsageKind::Model);
    for model in models.iter().take(most) {
        table.row([label(model), human_bytes(model.bytes), other_names(model)]);
    }
    let smaller = models.get(most..).unwrap_or_default();
    if !smaller.is_empty() {
        let bytes = smaller.iter().map(|row| row.bytes).fold(0, u64::saturating_add);
        let label = counted(smaller.len(), "more model");
        table.row([label, human_bytes(bytes), "`blobd df -v` lists them".to_owned()]);
    }
    let others = others.into_iter().filter(|row| row.bytes > 0 && row.kind != UsageKind::Reserve);
    for row in others {
        table.row([label(row), human_bytes(row.bytes), remark(row, usage).to_owned()]);
    }
    let reserve = usage.rows.iter().filter(|row| row.kind == UsageKind::Reserve && row.bytes > 0);
    for row in reserve {
        let store = usage.disk_bytes.saturating_sub(row.bytes);
        table.row(["store".to_owned(), human_bytes(store), String::new()]);
        table.row([label(row), human_bytes(row.bytes), remark(row, usage).to_owned()]);
    }
    table.row(["total".to_owned(), human_bytes(usage.disk_bytes), String::new()]);
    table
}

fn label(row: &UsageRow) -> String {
    let file = || row.digest.map(Digest::short).unwrap_or_default();
    match row.kind {
        UsageKind::Model => row.name.clone().unwrap_or_default(),
        UsageKind::Shared => "shared".to_owned(),
        UsageKind::InUse => "in use".to_owned(),
        UsageKind::Download => format!("download of {}", row.name.clone().unwrap_or_else(file)),
        UsageKind::Staging => "imports and pulls".to_owned(),
        UsageKind::Trash => "trash".to_owned(),
        UsageKind::Quarantine => "quarantine".to_owned(),
        UsageKind::Unneeded => "unneeded".to_owned(),
        UsageKind::Records => "records".to_owned(),
        UsageKind::Index => "index".to_owned(),
        UsageKind::Audit => "audit log".to_owned(),
        UsageKind::Reserve => "reserve".to_owned(),
        UsageKind::Directories => "directories".to_owned(),
        _ => "other files".to_owned(),
    }
}

fn other_names(row: &UsageRow) -> String {
    match row.other_names.len() {
        0 => String::new(),
        others => format!("and {}", counted(others, "other name")),
    }
}

/// Short, so that a line with the name of a usual model fits 80 columns.
const fn remark(row: &UsageRow, usage: &DiskUsage) -> &'static str {
    match row.kind {
        UsageKind::Shared => "several models need it",
        UsageKind::InUse => "no model needs it, but it is open",
        UsageKind::Download => "unfinished, see `blobd partial ls`",
        UsageKind::Staging => "in progress",
        UsageKind::Trash => "`blobd undelete` until it expires",
        UsageKind::Quarantine => "`blobd gc --quarantine` frees it",
        UsageKind::Unneeded if usage.reclaimable_bytes == 0 => "gc refuses, see `blobd gc --dry-run`",
        UsageKind::Unneeded => "`blobd gc` frees it",
        UsageKind::Records => "manifests and other small files",
        UsageKind::Index => "a cache, made again if it is lost",
        UsageKind::Audit => "see `blobd log`",
        UsageKind::Reserve => "for removing on a full disk",
        UsageKind::Other => "not blobd's",
        _ => "",
    }
}

fn notes(usage: &DiskUsage) -> impl Iterator<Item = String> + '_ {
    usage.rows.iter().filter(|row| row.bytes > 0 && !row.by.is_empty()).map(|row| {
        let what = if row.kind == UsageKind::InUse { "in use by" } else { "other files:" };
        format!("{what} {}", row.by.join("; "))
    })
}

fn limits(usage: &DiskUsage) -> Vec<String> {
    let models = if usage.models.is_empty() { "none".to_owned() } else { saving(usage) };
    let quota = usage.quota_bytes.map_or_else(
        || "none".to_owned(),
        |quota| {
            let (used, share) = (human_bytes(usage.used_bytes), percent(usage.used_bytes, quota));
            format!("{used} of {} used{share}{}", limit_bytes(quota), watermarks(usage))
        },
    );
    let (free, kept) = (human_bytes(usage.free_bytes), limit_bytes(usage.min_free_bytes));
    let disk = format!("disk    {free} free, of which the store leaves {kept} free (min_free)");
    vec![format!("models  {models}"), format!("quota   {quota}"), disk]
}

/// `2 models: 8.2 GiB as files, 5.1 GiB stored, 3.1 GiB saved (37 %)`
pub(super) fn saving(usage: &DiskUsage) -> String {
    let [files, stored, saved] = human_difference(usage.logical_bytes, usage.stored_bytes);
    let share = percent(usage.saved_bytes, usage.logical_bytes);
    let models = counted(usage.model_count, "model");
    format!("{models}: {files} as files, {stored} stored, {saved} saved{share}")
}

fn percent(part: u64, whole: u64) -> String {
    let percent = u128::from(part).saturating_mul(100).checked_div(whole.into());
    percent.map_or_else(String::new, |percent| format!(" ({percent} %)"))
}

fn watermarks(usage: &DiskUsage) -> String {
    match (usage.high_watermark_bytes, usage.low_watermark_bytes) {
        (Some(high), Some(low)) => {
            format!("; eviction above {}, to {}", human_bytes(high), human_bytes(low))
        }
        _ => String::new(),
    }
}

fn models(usage: &DiskUsage, width: usize) -> Table {
    let table = Table::new(&["MODEL", "SIZE", "UNIQUE", "SHARED", "LAST OPENED", "BY"], &[1, 2, 3]);
    let mut table = table.leaving_out_first(&["BY", "LAST OPENED", "SIZE"]);
    let mut models: Vec<_> = usage.models.iter().collect();
    models.sort_by(|a, b| b.unique_bytes.cmp(&a.unique_bytes).then_with(|| a.name.cmp(&b.name)));
    for model in models {
        table.row([
            model.name.clone(),
            human_bytes(model.logical_bytes),
            human_bytes(model.unique_bytes),
            human_bytes(model.shared_bytes),
            or_dash(model.last_opened.as_deref().map(relative)),
            or_dash(model.last_opened_by.as_ref().map(user)),
        ]);
        sharers(model, width).into_iter().for_each(|line| table.line(&line));
    }
    table
}

fn user(id: &UserId) -> String {
    id.user.clone().unwrap_or_else(|| id.uid.to_string())
}

const SHARED_WIDTH: usize = 78;

/// `  shared with base:8b 4.10 GiB, base:8b-q8 1.20 GiB and 3 more`, the one that shares the most first.
fn sharers(model: &ModelUsage, width: usize) -> Option<String> {
    const LABEL: &str = "  shared with ";
    const REST: usize = " 1023.9 MiB and 99999 more".len();
    let width = width.min(SHARED_WIDTH).saturating_sub(LABEL.len());
    let mut names = NameCutter::new(width.saturating_sub(REST));
    let mut with = |other: &SharedWith| format!("{} {}", names.shown(&other.name), human_bytes(other.bytes));
    let sharers: Vec<_> = model.shared_with.iter().map(&mut with).collect();
    let is_shared = !sharers.is_empty();
    is_shared.then(|| LABEL.to_owned() + &one_line(&sharers, width))
}

/// The largest parts are what matters; JSON lists more.
const MAX_PARTS: usize = 20;
/// The width of a list of names, so that a line fits 80 columns.
const NAMES_WIDTH: usize = 62;

fn shared_parts(usage: &DiskUsage) -> Table {
    let mut rows: Vec<(String, u64, usize)> = Vec::new();
    for part in usage.shared_parts.iter().take(MAX_PARTS) {
        let names = one_line(&part.models, NAMES_WIDTH);
        match rows.iter_mut().find(|(other, ..)| *other == names) {
            Some((_, bytes, parts)) => (*bytes, *parts) = (bytes.saturating_add(part.bytes), *parts + 1),
            None => rows.push((names, part.bytes, 1)),
        }
    }
    let rows = rows.into_iter().map(|(names, bytes, parts)| {
        let several = if parts == 1 { String::new() } else { format!("{parts} parts, ") };
        [human_bytes(bytes), several + &names]
    });
    let mut table = Table::with_rows(&["SHARED", "BY"], &[0], rows).with_texts_in(&[1]).with_names_in(&[]);
    let smaller = usage.shared_parts.get(MAX_PARTS..).unwrap_or_default();
    if !smaller.is_empty() {
        let bytes = smaller.iter().map(|part| part.bytes).fold(0, u64::saturating_add);
        table.row([human_bytes(bytes), format!("{} smaller parts, in --json", smaller.len())]);
    }
    table
}

fn downloads(usage: &DiskUsage) -> Table {
    let downloads = usage.rows.iter().filter(|row| row.kind == UsageKind::Download);
    let rows = downloads.map(|row| {
        let name = row.name.clone().or_else(|| row.digest.map(Digest::short));
        let size = |bytes: Option<u64>| or_dash(bytes.map(human_bytes));
        let user = or_dash(row.user.as_ref().map(user));
        [name.unwrap_or_default(), size(row.received_bytes), size(row.size), human_bytes(row.bytes), user]
    });
    Table::with_rows(&["UNFINISHED DOWNLOAD", "RECEIVED", "OF", "ON DISK", "BY"], &[1, 2, 3], rows)
        .leaving_out_first(&["BY", "ON DISK"])
}

fn trash(models: &[TrashedModel]) -> Table {
    let rows = models.iter().map(|model| {
        let size = human_bytes(model.size);
        [model.name.clone(), model.digest.short(), size, relative(&model.expires)]
    });
    // Several versions of one name may be there.
    Table::with_rows(&["IN THE TRASH", "ID", "SIZE", "EXPIRES"], &[2], rows).leaving_out_first(&["ID"])
}

fn quarantine(usage: &DiskUsage) -> Table {
    let blobs = usage.quarantined.iter();
    let rows = blobs.map(|blob| [blob.digest.short(), human_bytes(blob.bytes), relative(&blob.since)]);
    Table::with_rows(&["DAMAGED BLOB", "SIZE", "SINCE"], &[1], rows)
}

#[cfg(test)]
mod tests {
    use blobd_client::protocol::space::{QuarantinedBlob, SharedPart};

    use super::*;

    fn row(kind: UsageKind, name: Option<&str>, bytes: u64) -> UsageRow {
        UsageRow {
            kind,
            name: name.map(str::to_owned),
            other_names: Vec::new(),
            digest: None,
            bytes,
            size: Some(bytes),
            received_bytes: Some(bytes / 3),
            user: Some(UserId { uid: 1001, user: Some("bob".to_owned()) }),
            by: Vec::new(),
        }
    }

    fn usage() -> DiskUsage {
        const LARGE: u64 = 1023 << 30;
        let mut rows: Vec<_> =
            (0..12).map(|_| row(UsageKind::Model, Some("hf.co/user/repo:Q4_K_M"), LARGE)).collect();
        let kinds = [
            [UsageKind::Shared, UsageKind::InUse, UsageKind::Staging, UsageKind::Trash],
            [UsageKind::Quarantine, UsageKind::Records, UsageKind::Index, UsageKind::Reserve],
        ];
        rows.extend(
            kinds.concat().into_iter().chain([UsageKind::Unneeded]).map(|kind| row(kind, None, LARGE)),
        );
        rows.push(row(UsageKind::Directories, None, 0));
        rows.push(row(UsageKind::Download, Some("hf.co/me/repo:Q8_0"), LARGE));
        rows.push(UsageRow { by: vec!["lost+found".to_owned()], ..row(UsageKind::Other, None, LARGE) });
        let disk_bytes = rows.iter().map(|row| row.bytes).sum();
        let quota_bytes = Some(LARGE * 23);
        let (high_watermark_bytes, low_watermark_bytes) = (Some(LARGE * 22), Some(LARGE * 21));
        let (free_bytes, min_free_bytes, used_bytes) = (LARGE, 1 << 30, LARGE * 20);
        DiskUsage {
            disk_bytes,
            rows,
            quota_bytes,
            high_watermark_bytes,
            low_watermark_bytes,
            free_bytes,
            min_free_bytes,
            used_bytes,
            logical_bytes: LARGE * 30,
            stored_bytes: LARGE * 23,
            saved_bytes: LARGE * 7,
            model_count: 300,
            models: vec![ModelUsage {
                name: "hf.co/user/repo:Q4_K_M".to_owned(),
                logical_bytes: LARGE,
                unique_bytes: LARGE,
                shared_bytes: LARGE,
                last_opened: Some("2026-11-23T15:30:49Z".to_owned()),
                last_opened_by: Some(UserId { uid: 1000, user: Some("ann".to_owned()) }),
                shared_with: vec![SharedWith { name: "hf.co/user/repo:Q8_0".to_owned(), bytes: LARGE }; 30],
            }],
            shared_parts: vec![
                SharedPart {
                    bytes: LARGE,
                    model_count: 30,
                    models: vec!["hf.co/user/repo:Q4_K_M".to_owned(); 30],
                };
                MAX_PARTS + 5
            ],
            quarantined: vec![QuarantinedBlob {
                digest: Digest::of(b"damaged"),
                bytes: LARGE,
                since: "2026-11-23T15:30:49Z".to_owned(),
            }],
            ..DiskUsage::default()
        }
    }

    #[test]
    fn lines_fit_80_columns_without_cutting_names() {
        let usage = usage();
        let tables = [parts(&usage, 10), models(&usage, 80), shared_parts(&usage), downloads(&usage)];
        let tables = tables.map(|table| table.render(usize::MAX));
        let lines = tables.iter().flat_map(|table| table.lines()).map(str::to_owned);
        for line in lines.chain(limits(&usage)) {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }

    #[test]
    fn small_models_are_one_row_and_empty_parts_none() {
        let text = parts(&usage(), 10).render(usize::MAX);
        assert_eq!(text.matches("hf.co/user/repo:Q4_K_M").count(), 10, "{text}");
        assert!(text.contains("2 more models") && !text.contains("directories"), "{text}");
        assert_eq!(parts(&usage(), usize::MAX).render(usize::MAX).matches("Q4_K_M").count(), 12);
        assert!(text.lines().last().unwrap().starts_with("total"), "{text}");
    }

    #[test]
    fn details_are_tables_of_their_own() {
        let trash = vec![TrashedModel {
            name: "old:latest".to_owned(),
            digest: Digest::of(b"old"),
            size: 5 << 30,
            removed: "2026-11-23T15:30:49Z".to_owned(),
            expires: "2026-11-30T15:30:49Z".to_owned(),
            replaced: false,
            added_by: None,
        }];
        let text = details(&Document { usage: usage(), trash }, 80);
        let shared = "  shared with hf.co/user/repo:Q8_0 1023 GiB and 29 more";
        for part in [shared, "ann", "bob", "repo:Q4_K_M and 28 more", "5 smaller parts", "341 GiB"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.contains(&Digest::of(b"damaged").short()), "{text}");
        assert_eq!(details(&Document { usage: DiskUsage::default(), trash: Vec::new() }, 80), "");
    }

    #[test]
    fn quota_is_shown_with_its_share_and_watermarks() {
        let lines = limits(&usage());
        assert!(
            lines[0] == "models  300 models: 30.0 TiB as files, 23.0 TiB stored, 7.0 TiB saved (23 %)",
            "{lines:?}"
        );
        assert!(lines[1].contains("20.0 TiB of 23529 GiB used (86 %); eviction above 22.0 TiB"), "{lines:?}");
        assert_eq!(limits(&DiskUsage::default())[..2], ["models  none", "quota   none"]);
    }
}
