//! The memory of this machine and its GPUs.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use blobd_client::fit::Room;
use serde::Serialize;

/// `nvidia-smi` hangs if the driver does.
const NVIDIA_SMI_LIMIT: Duration = Duration::from_secs(5);
/// The memory that llama.cpp leaves free on each GPU when it chooses the layers itself (`--fit-target`).
const GPU_MARGIN: u64 = 1 << 30;
const MEBIBYTE: u64 = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Machine {
    /// `MemAvailable`, or what the cgroup leaves if that is less; `None` if the kernel does not say.
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
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let in_cgroup = left_in_cgroups(Path::new("/sys/fs/cgroup"), &own);
        let available_bytes = [available(&meminfo), in_cgroup].into_iter().flatten().min();
        Self { available_bytes, gpus }
    }

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

/// The least memory that the process's cgroup (v2) or one that contains it leaves; `None` if none has a limit. `own` is
/// the content of `/proc/self/cgroup`.
fn left_in_cgroups(root: &Path, own: &str) -> Option<u64> {
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let cgroup = root.join(path);
    cgroup.ancestors().take_while(|folder| folder.starts_with(root)).filter_map(left_in_cgroup).min()
}

/// What a cgroup's `memory.max` leaves. Inactive page cache counts as free, because the kernel drops it first.
fn left_in_cgroup(folder: &Path) -> Option<u64> {
    let text = |file: &str| fs::read_to_string(folder.join(file)).ok();
    let number = |file: &str| -> Option<u64> { text(file)?.trim().parse().ok() };
    let limit = number("memory.max")?;
    let statistics = text("memory.stat").unwrap_or_default();
    let inactive = statistics.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse().ok());
    let used = number("memory.current").unwrap_or(0).saturating_sub(inactive.unwrap_or(0));
    Some(limit.saturating_sub(used))
}

/// `None` if `nvidia-smi` is missing, fails or hangs.
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

/// GPUs whose driver reports their memory in the sysfs folder, as AMD's does.
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
    fn cgroup_with_the_least_left_limits_the_memory() {
        let root = tempfile::tempdir().unwrap();
        let cgroup = |path: &str, files: &[(&str, &str)]| {
            let folder = root.path().join(path);
            fs::create_dir_all(&folder).unwrap();
            for (file, content) in files {
                fs::write(folder.join(file), content).unwrap();
            }
        };
        let left = |own: &str| left_in_cgroups(root.path(), own);
        cgroup("a/b", &[("memory.max", "max\n"), ("memory.current", "5\n")]);
        assert_eq!(left("0::/a/b\n"), None, "no limit");
        cgroup("a", &[("memory.max", "1000\n"), ("memory.current", "700\n")]);
        assert_eq!(left("0::/a/b\n"), Some(300));
        cgroup("a", &[("memory.stat", "anon 600\ninactive_file 100\nactive_file 50\n")]);
        assert_eq!(left("0::/a/b\n"), Some(400), "inactive page cache is free");
        cgroup("a/b", &[("memory.max", "6\n")]);
        assert_eq!(left("0::/a/b\n"), Some(1));
        assert_eq!(["", "4:memory:/a/b\n", "0::/absent\n"].map(left), [None; 3]);
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
