package blobd

import (
	"net/url"
	"strconv"
)

// FitParams says how a model would be run, and into what memory it should fit. What is zero has the default of
// `blobd fit`.
type FitParams struct {
	// Context is the context of one sequence, in tokens.
	Context uint64
	// TrainedContext uses the context for which the model was trained instead of Context.
	TrainedContext bool
	// Batch is how many tokens are processed together.
	Batch uint64
	// Parallel is how many sequences are processed at the same time, each with the whole context.
	Parallel uint64
	// CacheTypeK and CacheTypeV are the types of keys and values in the cache, such as f16 or q8_0.
	CacheTypeK, CacheTypeV string
	// VRAMBytes is the memory of each device that the model may take.
	VRAMBytes []uint64
	// MemoryBytes is the machine's memory that the model may take; nil if it is not limited.
	MemoryBytes *uint64
	// CPUMoe leaves the experts of a mixture in the machine's memory.
	CPUMoe bool
	// Basis names the formulas: llama.cpp or ollama.
	Basis string
}

// FitMemory is the memory that one model needs.
type FitMemory struct {
	// Basis and GraphBasis are the formulas of the KV cache and of the computation graph, with their date.
	Basis      string `json:"basis"`
	GraphBasis string `json:"graph_basis"`
	// HasRule says whether the formulas know this model. If not, KV cache and graph are unknown, and it never fits.
	HasRule bool `json:"has_rule"`
	// Context is the context of one sequence, in tokens.
	Context  uint64 `json:"context"`
	Batch    uint64 `json:"batch"`
	Parallel uint64 `json:"parallel"`
	// CacheTypeK and CacheTypeV are the types of keys and values in the cache.
	CacheTypeK string `json:"cache_type_k"`
	CacheTypeV string `json:"cache_type_v"`
	// KVBytes is the KV cache of each block, KVTotalBytes their sum.
	KVBytes      []uint64 `json:"kv_bytes"`
	KVTotalBytes uint64   `json:"kv_total_bytes"`
	// GraphPartialBytes is the graph on each device if only a part of the model is on devices; GraphFullBytes if all is
	// on one.
	GraphPartialBytes uint64 `json:"graph_partial_bytes"`
	GraphFullBytes    uint64 `json:"graph_full_bytes"`
	// Weights are the weights by layer, WeightsBytes their sum.
	Weights      []FitLayer `json:"weights"`
	WeightsBytes uint64     `json:"weights_bytes"`
	// TableBytes is the part of the weights that is read from the disk row by row.
	TableBytes         uint64 `json:"table_bytes"`
	VisionWeightsBytes uint64 `json:"vision_weights_bytes"`
	VisionGraphBytes   uint64 `json:"vision_graph_bytes"`
	// MissingKeys are keys of the header that the formulas need and the model lacks.
	MissingKeys []string `json:"missing_keys"`
}

// FitLayer has the weights of a layer.
type FitLayer struct {
	// Layer is the layer's name, such as blk.0.
	Layer string `json:"layer"`
	Bytes uint64 `json:"bytes"`
	// Place is where they belong: device, memory, device_and_memory (experts in memory) or disk.
	Place string `json:"place"`
}

// FitDevice is what a device holds.
type FitDevice struct {
	VRAMBytes uint64 `json:"vram_bytes"`
	Layers    uint64 `json:"layers"`
	UsedBytes uint64 `json:"used_bytes"`
}

// Fit is the memory that a model needs, and whether it fits. docs/JSON.md describes the fields.
type Fit struct {
	FitMemory
	Name   string `json:"name"`
	Digest string `json:"digest"`
	// RequiredBytes is what one device must have so that everything fits on it; NeededBytes is what is needed in all.
	RequiredBytes uint64 `json:"required_bytes"`
	NeededBytes   uint64 `json:"needed_bytes"`
	FileBytes     uint64 `json:"file_bytes"`
	HeaderBytes   uint64 `json:"header_bytes"`
	// ContextLength is the context for which the model was trained; 0 if unknown.
	ContextLength uint64 `json:"context_length"`
	// ContextSource is why the estimate has its context: option, trained, model or default.
	ContextSource string   `json:"context_source"`
	Notes         []string `json:"notes"`
	// Projector is the file of the vision tower.
	Projector *struct {
		Basis        string `json:"basis"`
		WeightsBytes uint64 `json:"weights_bytes"`
	} `json:"projector"`
	// Draft is the model for speculative decoding that belongs to it.
	Draft *FitMemory `json:"draft"`
	// Adapters has the size of each adapter.
	Adapters []uint64 `json:"adapters"`
	// Fits says whether everything fits; nil if FitParams has neither VRAMBytes nor MemoryBytes. The fields below are then
	// zero.
	Fits *bool `json:"fits"`
	// MaxContext is the largest context with which everything fits; 0 if none.
	MaxContext uint64 `json:"max_context"`
	// Layers of LayersOf are on devices.
	Layers      uint64      `json:"layers"`
	LayersOf    uint64      `json:"layers_of"`
	VRAMBytes   uint64      `json:"vram_bytes"`
	TotalBytes  uint64      `json:"total_bytes"`
	MemoryBytes uint64      `json:"memory_bytes"`
	Devices     []FitDevice `json:"devices"`
	// Options are those of llama.cpp's programs.
	Options []string `json:"options"`
}

// Fit estimates the memory that a model needs, as `blobd fit` does; it opens and loads nothing.
func (c *Client) Fit(reference string, params FitParams) (Fit, error) {
	var fit Fit
	path := url.URL{Path: reference}
	return fit, c.query("/v1/fit/"+path.EscapedPath()+"?"+params.query().Encode(), &fit)
}

func (p FitParams) query() url.Values {
	query := url.Values{}
	number := func(key string, value uint64) {
		if value != 0 {
			query.Set(key, strconv.FormatUint(value, 10))
		}
	}
	text := func(key, value string) {
		if value != "" {
			query.Set(key, value)
		}
	}
	number("context", p.Context)
	if p.TrainedContext {
		query.Set("context", "0")
	}
	number("batch", p.Batch)
	number("parallel", p.Parallel)
	text("cache_type_k", p.CacheTypeK)
	text("cache_type_v", p.CacheTypeV)
	text("basis", p.Basis)
	for _, size := range p.VRAMBytes {
		query.Add("vram_bytes", strconv.FormatUint(size, 10))
	}
	if p.MemoryBytes != nil {
		query.Set("memory_bytes", strconv.FormatUint(*p.MemoryBytes, 10))
	}
	if p.CPUMoe {
		query.Set("cpu_moe", "true")
	}
	return query
}
