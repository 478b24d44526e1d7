//! System calls without a safe wrapper: the only `unsafe` code in this crate.
#![allow(unsafe_code)]

/// The local time of a moment, by the C library's time zone: `2026-11-23 16:02`; `None` if the C library cannot tell.
pub(crate) fn local_time(seconds_since_1970: u64) -> Option<String> {
    let seconds = libc::time_t::try_from(seconds_since_1970).ok()?;
    // SAFETY: needed because no safe crate has the call; zeros are a valid value of this struct of numbers and a
    // pointer that may be null.
    let mut fields: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: sound because both pointers are to live values of the right type for the time of the call.
    let filled = unsafe { libc::localtime_r(&raw const seconds, &raw mut fields) };
    if filled.is_null() {
        return None;
    }
    let (year, month) = (fields.tm_year.checked_add(1900)?, fields.tm_mon.checked_add(1)?);
    let (day, hour, minute) = (fields.tm_mday, fields.tm_hour, fields.tm_min);
    Some(format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}"))
}
