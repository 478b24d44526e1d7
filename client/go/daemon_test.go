package blobd

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

var dense = []spec{
	tensorOf("token_embd.weight", "F32", 64, 100),
	tensorOf("blk.0.attn_q.weight", "Q8_0", 64, 64),
	tensorOf("blk.0.attn_norm.weight", "F16", 64),
	tensorOf("blk.1.attn_q.weight", "Q8_0", 64, 64),
	tensorOf("output.weight", "F32", 64, 10000),
}

var stacked = []spec{tensorOf("blk.0.ffn_up_exps.weight", "Q8_0", 64, 32, 4), tensorOf("output_norm.weight", "F32", 64)}

// TestDaemon uses a real daemon, the same one in all subtests.
func TestDaemon(t *testing.T) {
	d := startDaemon(t)
	d.importModel("dense", dense)
	d.importModel("stacked", stacked)
	for name, test := range map[string]func(*testing.T, *daemon){
		"version and models are the daemon's":          versionAndModels,
		"every tensor is the file's":                   everyTensor,
		"selections bring what they name":              selections,
		"experts are found without mapping":            experts,
		"header is the file's start":                   headers,
		"metadata is the file's":                       metadata,
		"digests are the store's":                      digests,
		"estimate is that of the command":              estimates,
		"unknown model is not found":                   unknownModel,
		"error has the ID of its request":              errorHasRequest,
		"session lasts until close":                    sessionUntilClose,
		"forgotten model ends its session":             forgottenModel,
		"descriptors are read-only and close on exec":  descriptors,
		"many tensors open under a small limit":        smallLimit,
		"maps outlive the daemon, which can come back": daemonAway,
	} {
		t.Run(name, func(t *testing.T) { test(t, d) })
	}
}

func opened(t *testing.T, d *daemon, reference string, selection Selection) *Model {
	t.Helper()
	model, err := d.client().OpenSelection(reference, selection)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { model.Close() })
	return model
}

func names(model *Model) string {
	var list []string
	for _, tensor := range model.Tensors() {
		list = append(list, tensor.Name)
	}
	return strings.Join(list, " ")
}

func versionAndModels(t *testing.T, d *daemon) {
	version, err := d.client().Version()
	if err != nil || version.Protocol != 1 || version.Pid != uint64(d.process.Process.Pid) {
		t.Fatal(version, err)
	}
	models, err := d.client().Models()
	if err != nil || len(models) != 2 || models[0].Name != "dense:latest" || models[0].Size == 0 {
		t.Fatal(models, err)
	}
	details, err := d.client().Model("dense")
	if err != nil || details.Architecture != "llama" || len(details.Tensors) != len(dense) {
		t.Fatal(details, err)
	}
}

func everyTensor(t *testing.T, d *daemon) {
	model := opened(t, d, "dense", Selection{})
	for _, written := range dense {
		known, err := model.Tensor(written.name)
		if err != nil || known.Type != written.kind || fmt.Sprint(known.Shape) != fmt.Sprint(written.shape) {
			t.Error(known, err)
		}
		if component := model.Layers()[known.Layer].Component(); component != "model" {
			t.Error(component)
		}
		data, err := model.Map(written.name)
		if err != nil || !bytes.Equal(data, written.data) {
			t.Errorf("%s: %d bytes, %v", written.name, len(data), err)
		}
	}
	if _, err := model.Map("missing"); !errors.Is(err, ErrNoTensor) || CodeOf(err) != CodeNotFound {
		t.Error(err)
	}
}

func selections(t *testing.T, d *daemon) {
	if found := names(opened(t, d, "dense", Selection{Prefix: "blk.1."})); found != "blk.1.attn_q.weight" {
		t.Error(found)
	}
	if found := names(opened(t, d, "dense", Selection{Names: []string{"output.weight"}})); found != "output.weight" {
		t.Error(found)
	}
	if found := names(opened(t, d, "dense", Selection{Names: []string{}})); found != "" {
		t.Error(found)
	}
	if layers := opened(t, d, "dense", Selection{Component: "model"}).Layers(); len(layers) != 1 {
		t.Error(layers)
	}
	if _, err := d.client().OpenSelection("dense", Selection{Component: "template"}); CodeOf(err) != CodeNotFound {
		t.Error(err)
	}
	_, err := d.client().OpenSelection("dense", Selection{Names: []string{"no.such.tensor"}})
	if CodeOf(err) != CodeNotFound {
		t.Error(err)
	}
	_, err = d.client().OpenSelection("dense", Selection{Names: []string{"x"}, Prefix: "y"})
	if CodeOf(err) != CodeInvalidRequest {
		t.Error(err)
	}
}

func experts(t *testing.T, d *daemon) {
	model := opened(t, d, "stacked", Selection{})
	written := stacked[0]
	known, err := model.Tensor(written.name)
	if err != nil || known.Experts == nil || known.Experts.Count != 4 {
		t.Fatal(known, err)
	}
	for index := uint64(0); index < 4; index++ {
		start, end, err := known.ExpertRange(index)
		data, mapped := model.Expert(written.name, index)
		if err != nil || mapped != nil || !bytes.Equal(data, written.data[start:end]) {
			t.Error(index, err, mapped)
		}
	}
	if _, err := model.Expert(written.name, 4); !errors.Is(err, ErrNoExpert) {
		t.Error(err)
	}
	if _, err := model.Expert("output_norm.weight", 0); !errors.Is(err, ErrNoExpert) {
		t.Error(err)
	}
}

func headers(t *testing.T, d *daemon) {
	model := opened(t, d, "dense", Selection{})
	header, err := model.Header()
	if err != nil || len(header) == 0 || !bytes.HasPrefix(ggufOf(dense), header) {
		t.Fatal(len(header), err)
	}
	if _, err := model.LayerHeader(9); !errors.Is(err, ErrNoLayer) {
		t.Error(err)
	}
	if _, found, err := model.Text("template"); found || err != nil {
		t.Error(found, err)
	}
}

func metadata(t *testing.T, d *daemon) {
	model := opened(t, d, "dense", Selection{})
	found, err := model.Metadata()
	if err != nil {
		t.Fatal(err)
	}
	details, err := d.client().Model("dense")
	if err != nil || found.ParameterCount() != details.Parameters || found.Architecture() != details.Architecture {
		t.Error(found, details, err)
	}
	if err := model.Unmap(); err != nil {
		t.Fatal(err)
	}
	if architecture, ok := As[string](found, "general.architecture"); !ok || architecture != "llama" {
		t.Error("it stays valid")
	}
	if _, err := model.Metadata(); !errors.Is(err, ErrSessionClosed) {
		t.Error(err)
	}
}

func digests(t *testing.T, d *daemon) {
	found, err := opened(t, d, "dense", Selection{Prefix: "blk.0."}).TensorDigests()
	if err != nil || len(found) != 2 || !strings.HasPrefix(found["blk.0.attn_q.weight"], "sha256:") {
		t.Error(found, err)
	}
}

func estimates(t *testing.T, d *daemon) {
	for options, params := range map[string]FitParams{
		"--vram 1TiB --ctx 512 --parallel 2":   {Context: 512, Parallel: 2, VRAMBytes: []uint64{1 << 40}},
		"--vram 1TiB --cpu-moe --basis ollama": {CPUMoe: true, Basis: "ollama", VRAMBytes: []uint64{1 << 40}},
		"--vram 1TiB --vram 1GiB --batch 64":   {Batch: 64, VRAMBytes: []uint64{1 << 40, 1 << 30}},
		"--vram 1TiB --cache-type-k q8_0":      {CacheTypeK: "q8_0", VRAMBytes: []uint64{1 << 40}},
		"--vram 1TiB --cache-type-v bf16":      {CacheTypeV: "bf16", VRAMBytes: []uint64{1 << 40}},
	} {
		run := exec.Command(d.program, append([]string{"fit", "stacked", "--json"}, strings.Fields(options)...)...)
		run.Env = d.environment()
		// The exit code says whether it fits.
		output, _ := run.Output()
		var expected Fit
		if err := json.Unmarshal(output, &expected); err != nil {
			t.Fatal(options, err)
		}
		if found, err := d.client().Fit("stacked", params); err != nil || !reflect.DeepEqual(found, expected) {
			t.Errorf("%s: %+v, expected %+v, %v", options, found, expected, err)
		}
	}
	if need, err := d.client().Fit("dense", FitParams{}); err != nil || need.Fits != nil || need.NeededBytes == 0 {
		t.Error(need, err)
	}
	memory := uint64(0)
	if none, err := d.client().Fit("dense", FitParams{MemoryBytes: &memory}); err != nil || none.Fits == nil || *none.Fits {
		t.Error(none, err)
	}
	if _, err := d.client().Fit("dense", FitParams{TrainedContext: true}); CodeOf(err) != CodeInvalidRequest {
		t.Error(err)
	}
}

func unknownModel(t *testing.T, d *daemon) {
	_, err := d.client().Open("nobody:8b")
	var refused *DaemonError
	if !errors.As(err, &refused) || refused.Code != CodeNotFound || !strings.Contains(err.Error(), "nobody") {
		t.Error(err)
	}
	if _, err := d.client().Open("//:"); CodeOf(err) != CodeInvalidRequest {
		t.Error(err)
	}
}

func errorHasRequest(t *testing.T, d *daemon) {
	client := d.client()
	client.RequestPrefix = "job-7"
	for _, expected := range []string{"job-7.1", "job-7.2"} {
		_, err := client.Open("nobody:8b")
		if found := requestOf(err); found != expected {
			t.Errorf("%q, %q expected", found, expected)
		}
	}
	if _, err := client.Model("nobody:8b"); requestOf(err) != "job-7.3" {
		t.Error(err)
	}
}

func sessionUntilClose(t *testing.T, d *daemon) {
	// The daemon may still be ending those of earlier tests.
	d.waitForNoSession(func() {})
	before := openFds(t)
	model := opened(t, d, "dense", Selection{})
	data, err := model.Map("output.weight")
	if err != nil || d.sessionCount() != 1 {
		t.Fatal(err)
	}
	if err := errors.Join(model.Close(), model.Close()); err != nil {
		t.Error(err)
	}
	d.waitForNoSession(func() {})
	if !bytes.Equal(data, dense[4].data) {
		t.Error("the map changed")
	}
	if _, err := model.Map("output.weight"); !errors.Is(err, ErrSessionClosed) {
		t.Error(err)
	}
	if after := openFds(t); after != before {
		t.Error(before, after)
	}
	if err := errors.Join(model.Unmap(), model.Unmap()); err != nil {
		t.Error(err)
	}
}

func forgottenModel(t *testing.T, d *daemon) {
	if _, err := d.client().Open("dense"); err != nil {
		t.Fatal(err)
	}
	d.waitForNoSession(runtime.GC)
}

func descriptors(t *testing.T, d *daemon) {
	model := opened(t, d, "dense", Selection{})
	fd, ok := model.Fd(0)
	if !ok {
		t.Fatal("closed")
	}
	for _, flag := range []struct{ command, mask, expected int }{
		{syscall.F_GETFL, syscall.O_ACCMODE, syscall.O_RDONLY},
		{syscall.F_GETFD, syscall.FD_CLOEXEC, syscall.FD_CLOEXEC},
	} {
		flags, _, _ := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), uintptr(flag.command), 0)
		if int(flags)&flag.mask != flag.expected {
			t.Error(flags)
		}
	}
	if _, ok := model.Fd(99); ok {
		t.Error("a descriptor that is none")
	}
}

// limitFiles lets this process open this many more files, until the test ends.
func limitFiles(t *testing.T, more int) {
	t.Helper()
	var before syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	limit := syscall.Rlimit{Cur: uint64(openFds(t) + more), Max: before.Max}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Setrlimit(syscall.RLIMIT_NOFILE, &before) })
}

func smallLimit(t *testing.T, d *daemon) {
	var many []spec
	for number := range make([]int, 300) {
		many = append(many, tensorOf(fmt.Sprintf("blk.%d.attn_norm.weight", number), "F32", 64))
	}
	d.importModel("many", many)
	t.Cleanup(func() { d.command("rm", "many") })
	limitFiles(t, 100)
	model := opened(t, d, "many", Selection{})
	if _, ok := model.Fd(0); ok {
		t.Error("a descriptor was kept")
	}
	for _, written := range many {
		if data, err := model.Map(written.name); err != nil || !bytes.Equal(data, written.data) {
			t.Fatal(written.name, err)
		}
	}
	model.Close()
	limitFiles(t, 3)
	if _, err := d.client().Open("many"); !errors.Is(err, ErrFdsLost) || !strings.Contains(err.Error(), "ulimit -n") {
		t.Error(err)
	}
}

func daemonAway(t *testing.T, d *daemon) {
	model := opened(t, d, "dense", Selection{})
	d.stop()
	for _, written := range dense {
		if data, err := model.Map(written.name); err != nil || !bytes.Equal(data, written.data) {
			t.Error(written.name, err)
		}
	}
	_, err := d.client().Open("dense")
	if !errors.Is(err, ErrNotRunning) || !strings.HasSuffix(err.Error(), "start it with `blobd serve`") {
		t.Error(err)
	}
	d.start()
	t.Setenv(SocketVariable, d.socket())
	again, err := Open("dense")
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if data, err := again.Map("output.weight"); err != nil || !bytes.Equal(data, dense[4].data) {
		t.Error(err)
	}
}

func TestMain(m *testing.M) {
	// The tests must not use a daemon that already runs on the machine.
	os.Unsetenv(SocketVariable)
	os.Exit(m.Run())
}
