//! One suite for the guarantees of the verbs. It runs on a store in this process, through the socket of a
//! daemon, and through commands without a daemon.

mod content;
mod edit;
mod names;
mod space;
mod trash;
mod upkeep;

/// Runs each test of the suite in all three ways.
macro_rules! conformance {
    ($($module:ident: $($name:ident)*;)*) => {
        mod in_process {
            $($(
                #[test]
                fn $name() {
                    let folder = blobd_tests::temp_dirs::tmpfs_directory();
                    super::$module::$name(&blobd_tests::verbs::InProcess::open(folder.path()));
                }
            )*)*
        }

        mod through_socket {
            $($(
                #[test]
                fn $name() {
                    super::$module::$name(&blobd_tests::verbs::ThroughSocket::start());
                }
            )*)*
        }

        mod commands {
            $($(
                #[test]
                fn $name() {
                    super::$module::$name(&blobd_tests::verbs::Commands::new());
                }
            )*)*
        }
    };
}

conformance! {
    content:
        file_of_every_layout_is_exported_bit_for_bit
        every_tensor_blob_is_the_raw_bytes_of_its_tensor
        experts_are_located_inside_their_group
        show_reports_header_and_config
        refused_file_leaves_nothing_behind
        shard_is_refused_with_a_hint
        missing_blob_is_reported_as_corrupt;
    edit:
        edited_model_of_every_layout_differs_only_in_the_edited_keys
        edit_stores_a_header_and_shares_every_tensor
        edited_model_does_not_need_its_source
        edit_does_not_replace_another_model_unless_forced
        edit_that_changes_nothing_results_in_the_source
        dry_run_of_an_edit_writes_nothing
        edit_of_a_damaged_model_stores_nothing
        refused_edits_store_nothing
        removal_of_an_absent_key_is_reported_as_a_note;
    names:
        file_name_gives_the_model_its_name
        name_is_the_same_in_upper_and_lower_case
        tag_names_the_same_manifest
        unknown_name_is_not_found_and_removes_nothing
        digest_in_a_reference_must_match_the_model
        name_is_given_to_other_content_only_with_force
        replaced_model_can_be_restored_from_the_trash
        import_of_another_model_with_the_same_file_name_gets_another_name
        pinned_name_stays_with_its_model
        verb_that_takes_a_name_reports_the_model_that_had_it
        removal_reports_each_model_with_its_bytes_and_who_keeps_them
        dry_run_of_a_removal_reports_the_same_and_removes_nothing
        renamed_model_keeps_its_pin_and_origin
        rename_replaces_another_model_only_with_force
        origin_tells_where_a_model_came_from;
    space:
        second_import_of_a_file_stores_nothing
        sibling_adds_only_what_differs
        stacked_and_separate_experts_share_every_expert
        removal_frees_the_reported_bytes
        removal_keeps_shared_blobs_and_names_the_models_that_need_them
        dry_run_matches_the_collection
        unreadable_manifest_stops_collection
        unreadable_recipe_stops_collection
        missing_recipe_loses_no_blob
        file_that_is_not_a_tag_stops_collection
        nothing_is_reclaimable_while_collections_refuse
        reclaimable_bytes_are_those_on_disk_now
        usage_counts_are_consistent;
    trash:
        model_in_the_trash_frees_nothing_and_survives_collections
        model_restored_from_the_trash_is_exported_bit_for_bit
        undelete_does_not_replace_another_model
        undelete_succeeds_if_the_name_has_the_same_model
        undelete_restores_the_model_removed_last
        digest_chooses_among_models_in_the_trash
        expired_model_is_deleted_by_the_next_collection
        trash_is_listed_with_its_expiry
        bytes_in_the_trash_are_reported_separately
        removal_reports_that_the_trash_keeps_the_blobs
        unknown_name_is_not_in_the_trash
        damaged_record_in_the_trash_stops_collection
        damaged_record_does_not_hide_a_removal
        file_that_is_not_a_record_stops_collection;
    upkeep:
        pinned_model_is_not_removed_until_it_is_unpinned
        unpinning_an_unpinned_model_succeeds
        unknown_model_cannot_be_pinned
        files_of_a_dead_transaction_are_collected
        eviction_plan_of_a_store_without_a_quota_says_so
        doctor_finds_nothing_wrong_with_a_new_store
        doctor_names_the_file_that_stops_collections;
}

/// Imports a generated file under a name, in place of another model that has it.
fn replace(
    verbs: &impl blobd_tests::verbs::Verbs,
    file: &blobd_tests::model::ModelFile,
    name: &str,
) -> blobd_client::protocol::pull::Imported {
    let folder = blobd_tests::temp_dirs::tmpfs_directory();
    let path = file.write_to(folder.path(), "model.gguf");
    verbs.import_with(&path, Some(name), true).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Imports a generated file under a name.
fn import(
    verbs: &impl blobd_tests::verbs::Verbs,
    file: &blobd_tests::model::ModelFile,
    name: &str,
) -> blobd_client::protocol::pull::Imported {
    let folder = blobd_tests::temp_dirs::tmpfs_directory();
    let path = file.write_to(folder.path(), "model.gguf");
    verbs.import(&path, Some(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}
