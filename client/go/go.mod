module blobd

go 1.21
