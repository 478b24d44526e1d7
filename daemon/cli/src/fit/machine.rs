//! The memory of this machine and its GPUs.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use blobd_client::fit::Room;
use serde::Serialize;

/// How long `nvidia-smi` may take; it hangs if the driver does.
const NVIDIA_SMI_LIMIT: Duration = Duration::from_secs(5);
/// What llama.cpp leaves free on each GPU when it chooses the layers itself (`--fit-target`).
const GPU_MARGIN: u64 = 1 << 30;
const MEBIBYTE: u64 = 1 << 20;

/// What is free on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Machine {
    /// `MemAvailable`; `None` if the kernel does not say.
    pub(super) available_bytes: Option<u64>,
    pub(super) gpus: Vec<Gpu>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Gpu {
    pub(super) name: String,
    pub(super) free_bytes: u64,
}

impl Machine {
    pub(super) fn read() -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let mut gpus = nvidia_smi().map(|text| nvidia_gpus(&text)).unwrap_or_default();
        gpus.extend(amd_gpus(Path::new("/sys/class/drm")));
        Self { available_bytes: available(&meminfo), gpus }
    }

    /// What a model may take of it.
    pub(super) fn room(&self) -> Room {
        let devices = self.gpus.iter().map(|gpu| gpu.free_bytes.saturating_sub(GPU_MARGIN)).collect();
        Room { devices, memory_bytes: self.available_bytes }
    }
}

fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// What `nvidia-smi` prints; `None` if it is missing, fails or hangs.
fn nvidia_smi() -> Option<String> {
    let query = ["--query-gpu=name,memory.free", "--format=csv,noheader,nounits"];
    let mut child = Command::new("nvidia-smi")
        .args(query)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let start = Instant::now();
    while child.try_wait().ok()?.is_none() {
        if start.elapsed() > NVIDIA_SMI_LIMIT {
            // Not waited for: a process that hangs in the driver cannot be ended.
            child.kill().ok()?;
            return None;
        }
        sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn nvidia_gpus(text: &str) -> Vec<Gpu> {
    let gpu = |line: &str| {
        let (name, free) = line.rsplit_once(',')?;
        let free: u64 = free.trim().parse().ok()?;
        Some(Gpu { name: name.trim().to_owned(), free_bytes: free.checked_mul(MEBIBYTE)? })
    };
    text.lines().filter_map(gpu).collect()
}

/// The GPUs whose driver tells their memory in the sysfs folder, which is AMD's.
fn amd_gpus(folder: &Path) -> Vec<Gpu> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    let cards = names.into_iter().filter(|name| {
        name.strip_prefix("card").is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
    });
    let gpu = |name: String| {
        let number = |file: &str| -> Option<u64> {
            let path = folder.join(&name).join("device").join(file);
            fs::read_to_string(path).ok()?.trim().parse().ok()
        };
        let free = number("mem_info_vram_total")?.checked_sub(number("mem_info_vram_used")?)?;
        Some(Gpu { name, free_bytes: free })
    };
    cards.filter_map(gpu).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_that_of_the_kernel() {
        let meminfo = "MemTotal:       24576000 kB\nMemAvailable:    1024 kB\nBuffers: 1 kB\n";
        assert_eq!(available(meminfo), Some(1 << 20));
        for text in ["", "MemAvailable: much kB\n", "MemAvailable: 18446744073709551615 kB\n"] {
            assert_eq!(available(text), None, "{text}");
        }
    }

    #[test]
    fn gpus_of_nvidia_smi_are_read_and_other_lines_left_out() {
        let text = "NVIDIA H100 80GB HBM3, 80994\nNo devices were found\nRTX, Ada, 10\nbroken, [N/A]\n";
        let gpu = |name: &str, free: u64| Gpu { name: name.to_owned(), free_bytes: free << 20 };
        assert_eq!(nvidia_gpus(text), [gpu("NVIDIA H100 80GB HBM3", 80_994), gpu("RTX, Ada", 10)]);
    }

    #[test]
    fn gpus_of_sysfs_have_a_margin() {
        let folder = tempfile::tempdir().unwrap();
        for (card, total, used) in [("card0", "3221225472\n", "1073741824\n"), ("card1", "x", "1")] {
            let device = folder.path().join(card).join("device");
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("mem_info_vram_total"), total).unwrap();
            fs::write(device.join("mem_info_vram_used"), used).unwrap();
        }
        fs::create_dir(folder.path().join("card0-DP-1")).unwrap();
        let gpus = amd_gpus(folder.path());
        assert_eq!(gpus, [Gpu { name: "card0".to_owned(), free_bytes: 2 << 30 }]);
        let machine = Machine { available_bytes: None, gpus };
        assert_eq!(machine.room(), Room { devices: vec![1 << 30], memory_bytes: None });
        assert_eq!(amd_gpus(Path::new("/nonexistent")), []);
    }
}
