//! Reads the audit log.

use super::Client;
use crate::error::ClientError;
use crate::http::Request;
use crate::protocol::audit::{AuditRecord, LogEnd, LogEvent, LogParams};

impl Client {
    /// Reads the audit log: `on_record` is called for each record, the oldest first. With [`LogParams::follow`], returns
    /// only when the daemon ends. A user that does not administer the store gets its own records.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `not_found` when the audit log is off.
    pub fn log(
        &self,
        params: &LogParams,
        mut on_record: impl FnMut(AuditRecord),
    ) -> Result<LogEnd, ClientError> {
        let mut lines = self.send(Request::post("/v1/log", params)?)?.lines()?;
        while let Some(event) = lines.next_json()? {
            match event {
                LogEvent::Record(record) => on_record(*record),
                LogEvent::Done(end) => return Ok(end),
                LogEvent::Failed(response) => return Err(response.error.into()),
            }
        }
        Err(ClientError::Closed)
    }
}
