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
