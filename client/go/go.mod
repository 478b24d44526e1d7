module blobd

go 1.22
