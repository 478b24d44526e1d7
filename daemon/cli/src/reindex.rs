//! `blobd reindex`

use blobd_client::client::Client;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::upkeep::Reindexed;
use clap::Args;

use super::Global;
use super::connect::report;

/// Compare the index with the disk and correct it
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd reindex                                after files were put into the store by hand
  blobd reindex --json | jq .differences       0: the index was right

The index is a cache: nothing is lost with it, and models can be opened while it is rebuilt.")]
pub(super) struct Params {}

pub(super) fn run(global: &Global, _params: &Params) -> Result<(), ErrorBody> {
    report(global, Client::reindex, render)
}

fn render(done: &Reindexed) -> String {
    let (blobs, recipes, models) = (done.blob_count, done.recipe_count, done.model_count);
    let what = [counted(blobs, "blob"), counted(recipes, "recipe"), counted(models, "model")].join(", ");
    match done.differences {
        0 => format!("{what}: the index was right\n"),
        1 => format!("{what}: 1 wrong entry corrected\n"),
        count => format!("{what}: {count} wrong entries corrected\n"),
    }
}

fn counted(count: u64, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noun_has_a_plural_unless_the_count_is_one() {
        assert_eq!([0, 1, 2].map(|count| counted(count, "recipe")), ["0 recipes", "1 recipe", "2 recipes"]);
    }
}
